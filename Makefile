# make help says what there is. Each lane has a virtual environment of its own, made on first use.
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"    torch without CUDA

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# tests/conftest.py says which tests must share a worker.
PARALLEL := -n 2
VENV := .venv
VENV2 := .venv-dgl2
VENV_PBG := .venv-pbg

.DEFAULT_GOAL := help
.PHONY: help demo test test-dgl2 test-cluster test-pbg lint clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1 \t/' | expand -t 20

demo: $(VENV)/installed  ## build, train, evaluate and ask a small knowledge graph: 3 minutes
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash examples/stdlib/run.sh

test: lint  ## all that CI runs: lint, then every test
	$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_FLAGS)

test-dgl2: $(VENV2)/installed  ## every test with dgl 2.1.0 and torch 2.2.1
	$(VENV2)/bin/python -m pytest $(PARALLEL) $(PYTEST_FLAGS)

test-cluster: $(VENV)/installed  ## every fault of a job on two hosts, with a table: 2 minutes; root only
	$(VENV)/bin/python examples/benchmarks/cluster_faults.py

test-pbg: $(VENV_PBG)/installed  ## checkpoints to and from the real PyTorch-BigGraph 1.0.0
	$(VENV_PBG)/bin/python -m pytest $(PYTEST_FLAGS) tests/pbg

lint: $(VENV)/installed  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:  ## remove what the targets above made, the environments included
	rm -rf $(VENV) $(VENV2) $(VENV_PBG) demo build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The stamp is newer than setup.py once all is installed: a second call installs nothing and needs no network.
$(VENV)/installed: setup.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(PIP_FLAGS) -e '.[dgl1,test,dev]'
	touch $@

$(VENV2)/installed: setup.py
	$(PYTHON) -m venv $(VENV2)
	$(VENV2)/bin/python -m pip install -q $(PIP_FLAGS) -e '.[dgl2,test]'
	touch $@

# Its setup.py needs the pkg_resources of an older setuptools and imports torch: no build isolation.
$(VENV_PBG)/installed: setup.py
	$(PYTHON) -m venv $(VENV_PBG)
	$(VENV_PBG)/bin/python -m pip install -q $(PIP_FLAGS) -e '.[dgl1,test]' 'setuptools<81' wheel
	$(VENV_PBG)/bin/python -m pip install -q $(PIP_FLAGS) --no-build-isolation torchbiggraph==1.0.0
	touch $@
