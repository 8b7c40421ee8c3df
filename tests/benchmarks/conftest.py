import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session", autouse=True)
def benchmarks() -> Iterator[Path]:
    """The folder of the benchmarks, importable as it is for the scripts in it."""
    sys.path.insert(0, str(BENCHMARKS))
    yield BENCHMARKS
    sys.path.remove(str(BENCHMARKS))
