"""docs/theory.md is about the settings and signals that the package has."""

import re
from pathlib import Path

from fedfrozen_app.theory.command import FIGURES
from fedfrozen_app.theory.map import FIXED, SIGNALS
from fedfrozen_app.theory.settings import MAP

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "theory.md").read_text()


def rows(name: str) -> list[str]:
    """The first cells of the table between a pair of markers."""
    (block,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", TEXT, re.S)
    lines = [line for line in block.splitlines() if line.startswith("|")]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]]


def test_the_documented_map_has_the_settings_of_the_package() -> None:
    assert rows("map") == list(MAP)


def test_the_documented_signals_are_those_of_the_package() -> None:
    names = [signal.name for signal in (*FIXED, *SIGNALS)]
    assert rows("signals") == names


def test_every_figure_has_its_picture_and_its_command() -> None:
    for name in FIGURES:
        assert f"`fedfrozen theory {name} --out docs/theory`" in TEXT
        assert (ROOT / "docs" / "theory" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
