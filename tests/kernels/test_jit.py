"""Compiled loops follow their sources, and work where nothing can be cached."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dglkge.kernels.jit import compiled
from tests import warm

ROOT = Path(__file__).resolve().parents[2]

RULE = """
from dglkge.kernels.jit import compiled_inline
@compiled_inline
def descent(row, gradient, state, numbers):
    for j in range(row.shape[0]):
        row[j] -= numbers[0] * gradient[j]
"""

LOOP = """
from dglkge.kernels.jit import compiled
from dglkge.short.rules import descent
@compiled
def update(rows, gradients, numbers):
    for i in range(rows.shape[0]):
        descent(rows[i], gradients[i], (), numbers)
"""

ONE_STEP = """
import numpy as np
from dglkge.short.loops import update
rows, gradients = np.zeros((1, 2), np.float32), np.full((1, 2), 4, np.float32)
update(rows, gradients, (np.float32(1),))
print(rows[0].tolist(), len(update.stats.cache_hits))
"""

CHAINS = """
import numpy as np

def chains_of(ids, gradients):
    heads, last, links = {}, {}, np.full(len(ids), -1)
    for source, key in enumerate(ids.tolist()):
        if key in last:
            links[last[key]] = source
        heads.setdefault(key, source)
        last[key] = source
    addresses = gradients.__array_interface__["data"][0] + gradients.strides[0] * np.arange(len(ids))
    chain = np.array(list(heads.values())), links, addresses, np.ones(len(ids), np.int64)
    return np.array(list(heads)), chain
"""
"""Linked lists of gradient rows as of dglkge.optim.row_chains, whose package would import torch and DGL."""

DIGEST_OF_ADAM_STEPS = f"""{CHAINS}
import hashlib, sys
from dglkge.kernels import rules
from dglkge.kernels.chains import update_loop
f = np.float32
rng = np.random.default_rng(0)
if "part first" in sys.argv:
    one = np.ones(3, f)
    rules.adam(one, one.copy(), (one[:1].copy(), one.copy(), one.copy()), (0.1, 1e-8, 0.9, 0.999, 0))
gradients = rng.standard_normal((300, 50)).astype(f)
keys, chain = chains_of(rng.integers(0, 70, 300), gradients)
rows, mem = rng.standard_normal((2, 70, 50)).astype(f)
power, step = rng.random((70, 50)).astype(f), np.arange(70).astype(f)[:, None]
links, selected = (False, f(np.inf), f(0), f(1), np.inf), np.arange(len(keys))
update = update_loop(rules.adam)
for _ in range(5):
    update(rows, (step, mem, power), keys, selected, chain, links, (0.1, 1e-8, 0.9, 0.999, 0))
digest = hashlib.sha256(rows.tobytes() + mem.tobytes() + power.tobytes())
print(digest.hexdigest(), len(update.stats.cache_hits))
"""


def copied_package(folder: Path) -> Path:
    """Copy what compiles loops, without machine code, beside a loop of two short files."""
    package = folder / "dglkge"
    ignored = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    shutil.copytree(ROOT / "dglkge" / "kernels", package / "kernels", ignore=ignored)
    (package / "short").mkdir()
    for name, text in (("__init__", ""), ("short/rules", RULE), ("short/loops", LOOP)):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    return package


@pytest.fixture(scope="module")
def with_machine_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    copied_package(folder)
    step(folder, num_hits=0)
    return folder


IMPORT_AGAIN = """
import sys
for name in ["dglkge", *(name for name in sys.modules if name.startswith("dglkge.kernels"))]:
    del sys.modules[name]
"""
"""The process has imported numba and dglkge already, and is to import the package of its folder."""


def run(program: str, folder: Path, home: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the package of a folder and a home of its own."""
    words = [*warm.python(), "-c", IMPORT_AGAIN + program, *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "XDG_"))}
    environment.update(PYTHONPATH=str(folder), HOME=home)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def step(folder: Path, num_hits: int, row: float = -4.0, before: str = "", home: str = "") -> str:
    """Hold the row after a step, and whether the loop came from the cache; returns stderr."""
    done = run(before + ONE_STEP, folder, home or str(folder))
    assert done.stdout == f"[{row}, {row}] {num_hits}\n"
    return done.stderr


def test_a_changed_rule_in_another_file_reaches_its_callers(tmp_path: Path, with_machine_code: Path) -> None:
    package = shutil.copytree(with_machine_code / "dglkge", tmp_path / "dglkge")
    step(tmp_path, num_hits=1)
    (package / "short" / "rules.py").write_text(RULE.replace("-= ", "-= 3 * "), encoding="utf-8")
    step(tmp_path, num_hits=0, row=-12.0)
    step(tmp_path, num_hits=1, row=-12.0)


ONE_STEP_OF_A_USERS_RULE = f"""{CHAINS}
from dglkge.kernels.chains import update_loop
from my_rule import descent
gradients = np.full((1, 2), 4, np.float32)
_, chain = chains_of(np.zeros(1, np.int64), gradients)
rows, one, first = np.zeros((1, 2), np.float32), np.float32(1), np.zeros(1, np.int64)
update = update_loop(descent)
update(rows, (), first, first, chain, (False, one * np.float32(np.inf), 0 * one, one, np.inf), (one,))
print(rows[0].tolist(), len(update.stats.cache_hits))
"""


def test_the_loop_of_a_users_formula_is_cached_until_the_formula_changes(tmp_path: Path) -> None:
    copied_package(tmp_path)
    rule = tmp_path / "my_rule.py"
    changed = RULE.replace("-= ", "-= 2 * ")
    # The machine code of the first text is still there in the end.
    for text, row, num_hits in ((RULE, -4.0, 0), (changed, -8.0, 0), (changed, -8.0, 1), (RULE, -4.0, 1)):
        rule.write_text(text, encoding="utf-8")
        output = run(ONE_STEP_OF_A_USERS_RULE, tmp_path, str(tmp_path)).stdout
        assert output == f"[{row}, {row}] {num_hits}\n"


def test_results_do_not_depend_on_the_cache(tmp_path: Path) -> None:
    """Compiled, loaded from the cache, or loaded after a part of the loop: the same bits."""
    copied_package(tmp_path)
    programs = [[], [], ["part first"]]
    runs = [run(DIGEST_OF_ADAM_STEPS, tmp_path, str(tmp_path), *words).stdout.split() for words in programs]
    digests, num_hits = zip(*runs)
    assert num_hits == ("0", "1", "1") and len(set(digests)) == 1


def test_nothing_needs_a_folder_to_write_to(tmp_path: Path) -> None:
    """A read-only installation of a user without a home: here no cache folder can be made, even by root."""
    package = copied_package(tmp_path)
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("no folder", encoding="utf-8")
    step(tmp_path, num_hits=0, home="/dev/null")


@pytest.mark.parametrize(("kind", "contents"), [("nbi", b""), ("nbc", b"no machine code")])
def test_a_damaged_cache_is_no_obstacle(tmp_path, with_machine_code, kind, contents):
    package = shutil.copytree(with_machine_code / "dglkge", tmp_path / "dglkge")
    (file,) = (package / "short" / "__pycache__").glob(f"loops.update*.{kind}")
    file.write_bytes(contents)
    step(tmp_path, num_hits=0)


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
"""
NO_LOCKS = """
import errno, fcntl
def flock(*arguments):
    raise OSError(errno.ENOLCK, 'No locks')
fcntl.flock = flock
"""


@pytest.mark.parametrize("before, num_hits", [(FULL_DISK, [0]), (NO_LOCKS, [0, 1])], ids=["disk", "locks"])
def test_a_full_disk_or_a_file_system_without_locks_is_no_obstacle(tmp_path, before, num_hits):
    copied_package(tmp_path)
    for number in num_hits:
        step(tmp_path, number, before=before)


def test_one_process_compiles_a_loop_and_others_wait(tmp_path: Path) -> None:
    copied_package(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: run(ONE_STEP, tmp_path, str(tmp_path)), range(4)))
    assert sorted(process.stdout for process in done) == ["[-4.0, -4.0] 0\n", *3 * ["[-4.0, -4.0] 1\n"]]


def test_a_process_that_waits_in_vain_compiles_too(tmp_path: Path) -> None:
    """Another process holds the lock of a file and never releases it: waited for once, not for each loop."""
    package = copied_package(tmp_path)
    impatient = "import logging; from dglkge.kernels import jit; "
    impatient += "logging.basicConfig(level=logging.INFO); jit._CompileLock.limit = 0.1"
    with contextlib.ExitStack() as stack:
        for name in ("loops.py", "rules.py"):
            file = stack.enter_context(open(package / "short" / name, "rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        messages = step(tmp_path, num_hits=0, before=impatient)
    assert messages.count("another process has compiled loops of") == 1
    # What it has compiled is in the cache, and it holds no lock that would keep others waiting.
    step(tmp_path, num_hits=1, before=impatient)


def test_loops_keep_not_a_number() -> None:
    """Sums may be reordered, but NaN and infinity keep their meaning: the loops test for them."""

    @compiled
    def total(numbers: np.ndarray) -> float:
        result = 0.0
        for i in range(len(numbers)):
            result += numbers[i]
        return result

    assert total(np.arange(101.0)) == 5050
    assert np.isnan(total(np.array([1.0, np.nan])))
    assert np.isnan(total(np.array([np.inf, -np.inf])))
