"""A claim about freed memory: a process that keeps it does not fault the same pages in again."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from fedfrozen_app.training.memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def copies():
    return [torch.ones(2**20 + i) for i in range(23)]  # 4 MiB each

copies()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    copies()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", SCRIPT, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_kept_memory_is_not_faulted_in_again() -> None:
    assert faults("kept") < 0.5 * faults("given back")
