"""docs/plugin.md: its diffs are those of the examples, its tests exist and are all there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/plugin.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[(.+?)\])?`", TEXT)))


def sources(folder: str) -> list[str]:
    files = sorted((ROOT / "examples" / folder).rglob("*.py"))
    return [line for path in files for line in path.read_text().splitlines()]


def test_the_diffs_of_the_page_are_the_five_lines_between_the_examples() -> None:
    lines = [
        line
        for block in re.findall(r"```diff\n(.*?)```", TEXT, re.S)
        for line in block.splitlines()
    ]
    added = [line[1:] for line in lines if line.startswith("+")]
    assert len(added) == 5
    assert set(added).isdisjoint(sources("stock")) and set(added) <= set(sources("plugged"))
    kept = [line[1:] for line in lines if line[:1] in "- " and line[1:4] != "..."]
    assert kept and set(kept) <= set(sources("stock"))


@pytest.mark.parametrize("file, test, parameter", NAMED)
def test_every_cell_names_a_test_that_there_is(file: str, test: str, parameter: str) -> None:
    text = (ROOT / file).read_text()
    assert f"def {test}(" in text
    assert parameter in text


def test_every_strategy_and_model_that_is_tested_has_its_cell() -> None:
    from tests.mods.test_models import MODELS
    from tests.mods.test_strategies import STRATEGIES

    named = {parameter for _, _, parameter in NAMED}
    assert {*STRATEGIES, *MODELS} <= named
