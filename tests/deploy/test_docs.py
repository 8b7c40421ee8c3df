"""What docs/deployment.md names is there, and means what the page says."""

import re
import shlex
from pathlib import Path

import pytest

from fedfrozen_app.config import RunConfig
from fedfrozen_app.config_input import parse_overrides

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "deployment.md").read_text()
LINES = [
    line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S) for line in block.splitlines()
]
SOURCES = "".join(
    path.read_text() for path in [*ROOT.glob("docker-compose*.yml"), *(ROOT / "deploy").iterdir()]
    if path.is_file()
)  # fmt: skip


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"deploy/[\w.]+\.(?:sh|yml|py)|docker-compose[\w.]*\.yml", TEXT))
    assert {"deploy/supernode.sh", "deploy/node.yml", "docker-compose.gpu.yml"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_variable_of_the_page_is_read_and_every_one_of_compose_is_on_the_page() -> None:
    told = {
        name
        for row in re.findall(r"^\| (`[A-Z].*?) \|", TEXT, re.M)
        for name in re.findall(r"`([A-Z_]+)`", row)
        if not name.endswith("_")
    }
    assert told >= {"NUM_NODES", "KEYS", "DATA", "DATABASE", "BASE_IMAGE"}
    assert [name for name in told if not re.search(rf"\$\{{{name}\b", SOURCES)] == []
    compose = (ROOT / "docker-compose.yml").read_text() + (
        ROOT / "docker-compose.gpu.yml"
    ).read_text()
    read = {name for name in re.findall(r"\$\{([A-Z_]+)", compose)}
    assert [name for name in read if name not in TEXT and not name.startswith("S")] == []


@pytest.mark.parametrize("line", [line for line in LINES if " -c '" in line])
def test_the_keys_of_every_run_on_the_page_are_good(line: str) -> None:
    words = shlex.split(line)
    config = RunConfig.from_mapping(parse_overrides([words[words.index("-c") + 1]]))
    assert config.num_clients == 3


def test_the_defaults_of_the_page_are_those_of_compose() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    for name, value in re.findall(r"^\| `([A-Z_]+)` \| `?([\w./:-]+)`? \|", TEXT, re.M):
        if name in ("TORCH_INDEX", "DEVICE", "DATABASE"):
            continue
        assert f"${{{name}:-{value}}}" in compose, name
