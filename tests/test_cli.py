import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.config import RunConfig

FAST = ["rounds=2", "warmup-rounds=1", "local-steps=1", "max-train-examples=200",
        "max-test-examples=50", "num-clients=3", "weights=none", "public-fraction=0"]  # fmt: skip


def fedfrozen(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def test_config_lists_every_key_and_what_auto_stands_for() -> None:
    code, out, _ = fedfrozen("config")
    assert code == 0
    assert [key for key in RunConfig.keys() if key not in out] == []
    assert 'model = "auto"  (here "vit-digits")' in out
    words = " ".join(out.split())
    assert "| fedadagrad | latent: federated rule" in words
    assert "int | str: optimiser steps" in words
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "alpah=1"], "unknown config key 'alpah'; did you mean 'alpha'"),
        (["-c", "batch-size=0"], "batch-size: should be greater than or equal to 1, got 0"),
        (["warmup-rounds=1", "-c", "warmup-ratio=0.5"], "both set"),
        (["none.toml"], "experiment file 'none.toml' does not exist"),
        (["a.toml", "b.toml"], "one experiment file at most"),
        (["dataset=cifar10", "data-dir=/nowhere/at/all"], "/nowhere/at/all"),
        (["run-dir=/proc/nowhere", *FAST], "run-dir='/proc/nowhere' cannot be written"),
        (["dataset=cifar10", "data-dir=.", "model=vit_tny_patch16_224"], "vit_tiny_patch16_224"),
        (["dataset=x", "data-dir=.", "partitioner=local"], "submit the run with `flwr run`"),
        (["frozen=nothere", *FAST], "frozen item 'nothere' matches no entry"),
        (["frozen=head", "value-l2=0.1", *FAST], "value-l2=0.1 has no effect with frozen=head"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2_and_one_clear_line(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    code, out, err = fedfrozen("run", f"cache-dir={tmp_path}", *arguments)
    assert code == 2
    assert words in err and "Traceback" not in err + out


def test_a_run_prints_the_table_and_leaves_its_folder(tmp_path: Path) -> None:
    experiment = tmp_path / "one.toml"
    experiment.write_text('run-name = "from-file"\nseed = 3\nlr = 0.5\n')
    where = [f"run-dir={tmp_path}/runs", f"cache-dir={tmp_path}/cache"]
    code, out, _ = fedfrozen("run", str(experiment), *FAST, "-c", "lr=0.02", *where)
    assert code == 0
    rows = [line.split()[:2] for line in out.splitlines()]
    assert ["warm-up", "1"] in rows and ["frozen", "2"] in rows and ["run", "1-2"] in rows
    folder = tmp_path / "runs" / "from-file"
    assert str(folder) in out
    written = json.loads((folder / "config.json").read_text())["config"]
    assert (written["seed"], written["lr"], written["rounds"]) == (3, 0.02, 2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[2]["bytes_up"] < lines[1]["bytes_up"]
    code, _, err = fedfrozen("run", str(experiment), *FAST, *where)
    assert code == 2 and "not overwritten" in err


def test_a_failing_run_ends_with_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfrozen_app.training.worker import Worker

    def fail(*arguments: object) -> None:
        raise RuntimeError("no power")

    monkeypatch.setattr(Worker, "train", fail)
    where = [f"run-dir={tmp_path}", f"cache-dir={tmp_path}/cache", "run-name=broken"]
    code, out, err = fedfrozen("run", *FAST, *where)
    assert code == 1
    assert "round 1: 0 of 3 replies are usable" in err and "no power" in err
    assert (tmp_path / "broken" / "model.safetensors").exists()


def test_partition_draws_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, _ = fedfrozen(
        "partition", "alpha=0.1", "num-clients=7", f"cache-dir={tmp_path}", "--out", str(out)
    )
    assert code == 0 and text.startswith("7 clients, ")
    report = json.loads((out / "partition.json").read_text())
    assert sum(report["sizes"]) + report["num_public_examples"] == 1437
    assert (out / "partition.png").read_bytes()[:4] == b"\x89PNG"
