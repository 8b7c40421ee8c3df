"""Claims about what a report says of how its runs were made."""

import json
from pathlib import Path

from fedfrozen_app.report.page import html_list
from fedfrozen_app.report.provenance import common_keys, provenance
from fedfrozen_app.report.settings import read_settings
from fedfrozen_app.report.write import write_report
from fedfrozen_app.runs.provenance import config_hash
from fedfrozen_app.runs.store import RunFolder
from tests.report.test_report import write_run


def tell(run: RunFolder, **facts: object) -> dict[str, object]:
    path = run.path / "config.json"
    told = {**json.loads(path.read_text()), **facts}
    path.write_text(json.dumps(told))
    return dict(told["config"])


def test_a_report_says_how_its_runs_were_made(tmp_path: Path) -> None:
    command = "fedfrozen sweep a.toml"
    one = tell(
        write_run(tmp_path / "runs", "fedavg", 1, [0.1, 0.5, 0.6]),
        machine={"cores": 2, "processor": "Some CPU", "gpus": []},
        started="2026-03-01T10:00:00+00:00", command=command,
        git_revision="0123456789abcdef+changed",
    )  # fmt: skip
    two = tell(
        write_run(tmp_path / "runs", "fedprox", 1, [0.1, 0.4, 0.7]),
        machine={"cores": 8, "processor": "Some CPU", "gpus": ["H200"]},
        started="2026-03-04T10:00:00+00:00", command=command, git_revision=None,
    )  # fmt: skip
    out = tmp_path / "out"
    write_report([tmp_path / "runs"], out)
    lines = (out / "provenance.md").read_text().splitlines()
    said = dict(line.removeprefix("- ").split(": ", 1) for line in lines)
    assert said["runs"] == "2, 12 s of rounds in all"  # 2 runs of 3 lines, 2 s each
    assert said["machine"] == "2 cores, Some CPU, no GPU; 8 cores, Some CPU, H200"
    assert said["date"] == "2026-03-01 to 2026-03-04"
    assert said["revision"] == "0123456789ab and changes; not recorded"
    assert said["command"] == f"`{command}`"
    assert said["config hash"] == f"`{config_hash([one, two])}`"
    assert said["in common"] == "`rounds=2`"
    assert said["software"].startswith("python 3.")
    page = (out / "report.html").read_text()
    assert f"<li>command: <code>{command}</code></li>" in page


def test_runs_older_than_the_record_say_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "fedavg", 1, [0.1, 0.5])
    path = run.path / "config.json"
    told = json.loads(path.read_text())
    for name in ("started", "command", "machine", "versions"):
        del told[name]
    path.write_text(json.dumps(told))
    said = provenance(read_settings([run.path]))
    assert "- software: not recorded\n- revision" in said and "- machine: not recorded\n" in said
    assert "- date: not recorded\n" in said and "- command: `not recorded`\n" in said


def test_common_keys_name_what_is_read_without_its_folder(tmp_path: Path) -> None:
    config = {"data-dir": "/somewhere/cifar10", "lr": 0.5, "seed": 3, "rounds": 12}
    assert common_keys([config, {**config, "lr": 0.1}]) == ["data-dir=cifar10"]


def test_a_list_cannot_be_markup() -> None:
    assert html_list("- a: `<b>`\n") == "<ul><li>a: <code>&lt;b&gt;</code></li></ul>"
