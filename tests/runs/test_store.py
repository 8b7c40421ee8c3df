import io
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.runs.store import RoundMetrics, RunFolder, atomic_path
from fedfrozen_app.runs.summary import closing_table, format_bytes

LINE = RoundMetrics(
    round=0,
    phase="start",
    strategy="fedfrozen",
    train_loss=None,
    test_loss=2.5,
    test_accuracy=0.125,
    clients=0,
    num_examples=0,
    bytes_up=0,
    bytes_down=0,
    wire_bytes_up=0,
    wire_bytes_down=0,
    seconds_train=0.0,
    seconds_total=0.5,
    dropped=0,
)
RUN = [
    LINE,
    replace(LINE, round=1, phase="warmup", clients=3, bytes_up=3000, bytes_down=3300),
    replace(LINE, round=2, phase="warmup", clients=3, bytes_up=3000, bytes_down=3300),
    replace(LINE, round=3, phase="frozen", clients=2, dropped=1, bytes_up=900, bytes_down=3300),
    replace(
        LINE, round=4, phase="frozen", clients=3, bytes_up=1500, bytes_down=1800, test_accuracy=0.75
    ),
    replace(
        LINE,
        round=5,
        phase="frozen",
        clients=3,
        bytes_up=1500,
        bytes_down=1800,
        test_accuracy=None,
        test_loss=None,
    ),
]


def config(folder: Path, **keys: object) -> RunConfig:
    return RunConfig.from_mapping({"run-dir": str(folder), **keys})


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    for line in RUN:
        folder.append(line)
    assert folder.metrics() == RUN


def test_a_diverged_loss_is_null_in_strict_json(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    folder.append(replace(LINE, test_loss=float("nan"), train_loss=float("inf")))
    text = (folder.path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["test_loss"] is None and line["train_loss"] is None


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with atomic_path(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644


def test_names(tmp_path: Path) -> None:
    paths = [RunFolder.create(config(tmp_path)).path.name for _ in range(3)]
    assert paths == [f"digits-fedfrozen-seed1{tail}" for tail in ("", "-2", "-3")]
    RunFolder.create(config(tmp_path, **{"run-name": "mine"}))
    with pytest.raises(ConfigError, match="mine.*not overwritten"):
        RunFolder.create(config(tmp_path, **{"run-name": "mine"}))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (810_280, "810 kB"), (40_514_000, "40.5 MB"),
     (293_154_856, "293 MB"), (999_700, "1.00 MB"), (7.1e12, "7100 GB")],
)  # fmt: skip
def test_bytes_in_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_long_runs_fit_the_table_as_well() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    long = [replace(line, seconds_total=987.65, bytes_up=293_154_856 * 20) for line in RUN]
    console.print(closing_table(long, "name"))
    text = console.export_text()
    assert "…" not in text and " 1975" in text and " 4938" in text


def test_the_closing_table_has_a_row_for_each_phase_within_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(closing_table(RUN, "name"))
    rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "warm-up 1-2 0.1250 2.5000 1.00 kB 1.10 kB 6.00 kB 6.60 kB 1.0" in rows
    # the last tested round of the phase, and the bytes of its last round
    assert "frozen 3-5 0.7500 2.5000 500 B 600 B 3.90 kB 6.90 kB 1.5" in rows
    assert "run 1-5 0.7500 2.5000 9.90 kB 13.5 kB 2.5" in rows
