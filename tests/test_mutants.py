"""Faults in rules, codecs and latents turn a fast test red: each in a copy, where its tests run."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.strategies.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
JOBS = 2
# what a copy needs beside the package
TESTS = ("__init__.py", "conftest.py")
TESTS += ("references", "strategies", "transport", "models", "training")
NOT_THE_COPY = 17
PLUGIN = f"""
import os
import fedfrozen_app, tests.references.rules, tests.strategies.clients
here = os.path.dirname(os.path.abspath(__file__))
for module in (fedfrozen_app, tests.references.rules, tests.strategies.clients):
    if not os.path.abspath(module.__file__).startswith(here + os.sep):
        os._exit({NOT_THE_COPY})
"""
# Imports the libraries once and forks for each run; what is under test is imported anew there.
SERVER = """
import os, sys
import pytest, timm, tests.strategies.clients
for name in [name for name in sys.modules if name.partition(".")[0] in ("fedfrozen_app", "tests")]:
    del sys.modules[name]
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = pytest.main(line.split())
        sys.stdout.flush()
        os._exit(code)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
OPTIONS = "-x -q --tb=line --show-capture=no --color=no -p only_the_copy -p no:cacheprovider"


class Copy:
    """The package and its tests in a folder, and a process that runs them there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("fedfrozen_app", "pyproject.toml", *(f"tests/{part}" for part in TESTS)):
            source, target = ROOT / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)
        (folder / "only_the_copy.py").write_text(PLUGIN)
        settings = {
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins that are imported too early warn
            "OMP_NUM_THREADS": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=folder,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, files: Iterable[str]) -> tuple[int, str]:
        """Run tests up to the first that fails; return pytest's exit code and output."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(OPTIONS, *files, file=self._server.stdin, flush=True)
        output = ""
        for line in self._server.stdout:
            if line.startswith("exit code "):
                return int(line.split()[-1]), output
            output += line
        raise RuntimeError(f"the process that runs the tests has ended:\n{output}")

    def failed_test(self, mutant: Mutant) -> str | None:
        """Return the test that a fault turns red; None if all pass."""
        path = self.folder / mutant.file
        sound = path.read_text()
        path.write_text(sound.replace(mutant.old, mutant.new))
        try:
            code, output = self.run([mutant.test_file])
        finally:
            path.write_text(sound)
        if code == 0:
            return None
        # 1 = a test failed: it ran, so the fault is no mere syntax or import error
        found = re.search(r"^FAILED \S*::(\w+)", output, re.MULTILINE)
        is_error = re.search(r"^ERROR |\b\d+ errors? in ", output, re.MULTILINE)
        assert code == 1 and found and not is_error, (mutant, output)
        return found[1]

    def close(self) -> None:
        self._server.communicate()


def test_every_fault_still_applies_and_every_rule_has_some() -> None:
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        assert source.count(mutant.old) == 1, mutant
        compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
        assert (ROOT / mutant.test_file).is_file(), mutant
    assert len({mutant[2:5] + mutant[:1] for mutant in MUTANTS}) == len(MUTANTS)
    faults = Counter(mutant.rule for mutant in MUTANTS)
    assert len(faults) == 10 and min(faults.values()) >= 5


@pytest.mark.slow
def test_every_fault_in_a_rule_turns_a_fast_test_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies: SimpleQueue[Copy] = SimpleQueue()
    everything = [Copy(tmp_path / str(job)) for job in range(JOBS)]
    for copy in everything:
        copies.put(copy)
    code, output = everything[0].run(sorted({mutant.test_file for mutant in MUTANTS}))
    assert code == 0, output

    def judge(mutant: Mutant) -> str | None:
        copy = copies.get()
        try:
            killer = copy.failed_test(mutant)
        finally:
            copies.put(copy)
        with capsys.disabled():
            verdict = f"red: {killer}" if killer else "SURVIVED"
            print(f"\n{mutant.rule}: {mutant.what} ({mutant.file}): {verdict}", end="", flush=True)
        return killer

    with ThreadPoolExecutor(JOBS) as pool:
        killers = list(pool.map(judge, MUTANTS))
    for copy in everything:
        copy.close()
    assert [m for m, killer in zip(MUTANTS, killers, strict=True) if killer is None] == []
