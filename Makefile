# make help lists the targets. They create a virtual environment on first use.
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"    torch without CUDA
#   make test-dgl PYTHON=python3.13 VENV=.venv-3.13 TORCH=torch                     another Python, the newest torch

# The first interpreter that runs, in the order of preference.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.10 python3; do \
    $$name -c pass 2>/dev/null && echo $$name && break; done)
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# Two workers for each of two cores: many tests wait, and each worker imports all tests. tests/conftest.py
# decides which tests share a worker.
PARALLEL := -n 4
# What calls DGL or torch: the part of the tests whose result may differ between versions.
DGL_TESTS := $(addprefix tests/,distributed embeddings evaluation inference model optim sampling training \
    functional/test_training_job.py functional/test_repeated_training.py \
    launch/test_launch_dgl_job.py partition_tools/test_partition_command.py partition_tools/test_build_graph.py)
# A minute and a half of processor time, in which no job starts. Left out: what Triton interprets, and mines rules.
FAST_TESTS := $(addprefix tests/,config contract data inference planning sampling step warm test_errors.py \
    evaluation/test_metrics.py test_makefile.py) \
    $(addprefix --ignore=tests/,step/test_gpu_kernels.py inference/test_reasons.py)
# The launcher's tests that run once more as an ordinary user and in the background: each a minute or two.
LAUNCHER_TESTS := $(addprefix tests/launch/test_,any_machine.py console.py launch_command.py \
    log_format.py ports.py restarts.py supervisor.py table_files.py node_program.py \
    launch_dgl_job.py::test_runs_to_its_end) tests/planning/test_host.py
VENV_LOWEST := .venv-lowest
VENV_PBG := .venv-pbg
VENV_DOCS := .venv-docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-user test-nohup test-dgl test-lowest test-cluster test-pbg lint docs clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1 \t/' | expand -t 20

demo: $(VENV)/installed  ## a small knowledge graph: build, train, evaluate, predict: 3 minutes
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash benchmarks/demo.sh

test: lint  ## lint, then every test: 10 to 16 minutes
	$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_FLAGS)

test-fast: $(VENV)/installed  ## the fast ones of the tests that start no job: 1 minute
	$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_FLAGS) $(FAST_TESTS)

test-user: $(VENV)/installed  ## the launcher's tests as an ordinary user: nobody, if you are root
	.ci/as_user $(CURDIR)/$(VENV)/bin/python -m pytest -p no:cacheprovider $(PARALLEL) $(LAUNCHER_TESTS)

test-nohup: $(VENV)/installed  ## the launcher's tests as a shell's background starts them: SIGINT and SIGHUP ignored
	trap '' INT HUP; $(VENV)/bin/python -m pytest $(PARALLEL) $(LAUNCHER_TESTS) < /dev/null

test-dgl: $(VENV)/installed  ## the tests that call DGL or torch, for another Python or torch: 6 minutes
	$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_FLAGS) $(DGL_TESTS)

test-lowest: $(VENV_LOWEST)/installed  ## the same with the lowest version of each core requirement, on Python 3.10
	$(VENV_LOWEST)/bin/python -m pytest $(PARALLEL) $(PYTEST_FLAGS) $(DGL_TESTS)

test-cluster: $(VENV)/installed  ## every fault of a job on two hosts, with a table: 2 minutes; root only
	$(VENV)/bin/python benchmarks/cluster_faults.py

test-pbg: $(VENV_PBG)/installed  ## checkpoints to and from the real PyTorch-BigGraph 1.0.0
	$(VENV_PBG)/bin/python -m pytest $(PYTEST_FLAGS) tests/pbg

lint: $(VENV)/installed  ## ruff, import-linter and mypy, strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

docs: $(VENV_DOCS)/installed  ## the documentation as a web site, in site/
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict --quiet  # an advertisement of mkdocs-material

clean:  ## remove everything that the other targets create, environments included
	rm -rf $(VENV) $(VENV_LOWEST) $(VENV_PBG) $(VENV_DOCS) site demo build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Each environment has a stamp, newer than pyproject.toml once all is installed: later calls need no network.
# dglkge-engine installs DGL where Python is newer than its wheels; elsewhere pip has done so.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
	    "$(PYTHON) is Python %d.%d: allowed: 3.10 and newer, e.g. make test PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(PIP_FLAGS) '$(TORCH)' -e '.[train,test,dev]'
	$(VENV)/bin/dglkge-engine --pip_flags="$(PIP_FLAGS)"
	touch $@

$(VENV_LOWEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_LOWEST)
	sed -nE 's/^    "([a-z0-9]+)>=([0-9.]+)",$$/\1==\2/p' pyproject.toml > $(VENV_LOWEST)/lowest.txt
	$(VENV_LOWEST)/bin/python -m pip install -q $(PIP_FLAGS) -c $(VENV_LOWEST)/lowest.txt -e '.[train,test]'
	touch $@

# PyTorch-BigGraph's setup.py needs the pkg_resources of an older setuptools and imports torch: no build isolation.
$(VENV_PBG)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_PBG)
	$(VENV_PBG)/bin/python -m pip install -q $(PIP_FLAGS) '$(TORCH)' -e '.[train,test]' 'setuptools<81' wheel
	$(VENV_PBG)/bin/python -m pip install -q $(PIP_FLAGS) --no-build-isolation torchbiggraph==1.0.0
	touch $@

# mkdocstrings reads the sources without importing them: neither DGL nor torch is needed. hooks.py imports the configuration.
$(VENV_DOCS)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install -q $(PIP_FLAGS) mkdocs==1.6.1 mkdocs-material==9.8.2 \
	    mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 nbconvert==7.17.2 latex2mathml==3.81.1 ruff==0.17.6 \
	    numpy psutil pydantic pyyaml rich tqdm
	touch $@
