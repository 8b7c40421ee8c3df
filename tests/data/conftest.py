from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.config import RunConfig


@pytest.fixture(autouse=True, scope="package")
def no_progress_bars() -> None:
    import datasets

    datasets.disable_progress_bars()


@pytest.fixture
def run_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Build a config whose cache is the test's own."""

    def build(**settings: Any) -> RunConfig:
        return RunConfig(cache_dir=str(tmp_path / "cache"), **settings)

    return build
