from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and weights that may lie beside the checkout."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("no folder with shared data beside the checkout")
    return folder
