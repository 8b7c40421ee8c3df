import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder that the runs of a session share."""
    return str(tmp_path_factory.mktemp("cache"))
