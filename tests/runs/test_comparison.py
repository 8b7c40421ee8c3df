"""What makes runs comparable is read from their folders, and what does not is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.runs.comparison import differences, statement
from fedfrozen_app.runs.store import RunFolder

CONFIG = {
    "seed": 1, "rounds": 10, "byte-budget": 0, "fraction-train": 1.0, "local-epochs": 1,
    "local-steps": 0, "work": "fixed", "batch-size": 16, "precision": "bf16",
}  # fmt: skip
PARTITION = {
    "dataset_key": "k", "settings": {"alpha": 0.1}, "num_clients": 2,
    "clients": [[0, 1], [2]], "public": [], "validation": [3], "test": [0],
}  # fmt: skip
START = {"model": {"sha256": "a"}, "preprocessing": {"image_size": 56}}


def run(
    folder: Path,
    name: str,
    config: dict[str, Any] | None = None,
    partition: dict[str, Any] | None = None,
    start: dict[str, Any] | None = None,
) -> RunFolder:
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"config": {**CONFIG, **(config or {})}}))
    (path / "partition.json").write_text(json.dumps({**PARTITION, **(partition or {})}))
    (path / "start.json").write_text(json.dumps({**START, **(start or {})}))
    return RunFolder(path)


def test_methods_on_the_same_ground_are_one_comparison(tmp_path: Path) -> None:
    same = [
        run(tmp_path, "fedavg", {"strategy": "fedavg", "lr": 0.1}),
        run(tmp_path, "scaffold", {"strategy": "scaffold", "lr": 0.3}),
    ]
    assert differences(same) == []
    assert statement(same).startswith("Checked: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {"rounds": 20}}, "communication differs: one has rounds=10; two has rounds=20"),
        (
            {"config": {"local-epochs": 2, "batch-size": 8}},
            "local work differs: one has batch-size=16, local-epochs=1; two has batch-size=8, "
            "local-epochs=2",
        ),
        ({"partition": {"clients": [[0], [1, 2]]}}, "partition differs between one and two"),
        ({"partition": {"test": [1]}}, "partition differs between one and two"),
        ({"start": {"model": {"sha256": "b"}}}, "first model differs between one and two"),
        ({"start": {"preprocessing": {}}}, "preprocessing is not known of two"),
    ],
)
def test_what_differs_beside_the_method_is_said(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    runs = [run(tmp_path, "one"), run(tmp_path, "two", **change)]
    assert differences(runs) == [said]
    assert statement(runs) == f"Not one comparison: {said}."


def test_other_data_or_another_seed_is_another_comparison(tmp_path: Path) -> None:
    other = {"settings": {"alpha": 0.5}, "clients": [[0], [1, 2]]}
    runs = [
        run(tmp_path, "one"),
        run(tmp_path, "alpha", partition=other, start={"model": {"sha256": "b"}}),
        run(tmp_path, "seed", {"seed": 2}, {"clients": [[1], [0, 2]]}),
    ]
    assert differences(runs) == []


def test_an_older_run_is_not_taken_for_a_checked_one(tmp_path: Path) -> None:
    runs = [run(tmp_path, "old"), run(tmp_path, "new")]
    for name in ("partition.json", "start.json"):
        (tmp_path / "old" / name).unlink()
    assert differences(runs)[:1] == ["partition is not known of old"]
    assert "first model is not known of old" in statement(runs)


def test_runs_with_nothing_in_common_are_not_said_to_be_checked(tmp_path: Path) -> None:
    few, many = ({"settings": {"max-train-examples": size}} for size in (100, 5000))
    one, two = run(tmp_path, "one", partition=few), run(tmp_path, "two", partition=many)
    assert statement([one, two]).startswith("Nothing to check: no two runs have data")
    three = run(tmp_path, "three", partition=many)
    assert statement([one, two, three]).endswith("or a seed of its own: one.")
