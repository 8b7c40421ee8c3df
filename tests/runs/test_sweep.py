"""The grid: what a file expands to, what is refused, what counts as done."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.config_input import format_override, parse_overrides
from fedfrozen_app.runs import sweep_cost
from fedfrozen_app.runs.finished import has_diverged, identity, is_finished
from fedfrozen_app.runs.store import RoundMetrics, RunFolder
from fedfrozen_app.runs.sweep import Sweep, parse_only, read_sweep, safe_name
from fedfrozen_app.runs.sweep_cost import cohort, examples_per_round
from fedfrozen_app.runs.sweep_table import (
    group,
    plan_summary,
    read_result,
    result_row,
    short,
    spread,
)

METHODS = (
    '[{name = "flite", strategy = "latent", generator = "sketch"},'
    ' {name = "fedavg", strategy = "fedavg"}]'
)
GRID = f"""
rounds = 3
lr = 0.05
[sweep]
method = {METHODS}
alpha = [0.1, 0.5]
seed = [7, 5, 3]
"""
LINE = RoundMetrics(
    round=0,
    phase="start",
    strategy="fedavg",
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


def sweep_of(tmp_path: Path, text: str, overrides: Any = None, **options: Any) -> Sweep:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return read_sweep(path, overrides, out=tmp_path / "out", **options)


def swept(text: str, base: str = "") -> str:
    return f"{base}\n[sweep]\n{text}\n"


def make_run(config: RunConfig, *lines: RoundMetrics, failure: str = "") -> RunFolder:
    """A folder as a run of that config leaves it; without lines it went through all rounds."""
    folder = RunFolder.create(config)
    for line in lines or (LINE, replace(LINE, round=config.rounds)):
        folder.append(line)
    if failure:
        folder.write_failure(failure)
    (folder.path / "model.safetensors").touch()
    return folder


# --- expansion ------------------------------------------------------------------------------
def test_the_grid_is_the_product_in_file_order_with_the_last_label_fastest(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, GRID)
    assert len(sweep.cells) == 2 * 2 * 3
    assert [cell.name for cell in sweep.cells[:4]] == [
        "flite-alpha=0.1-seed=7",
        "flite-alpha=0.1-seed=5",
        "flite-alpha=0.1-seed=3",
        "flite-alpha=0.5-seed=7",
    ]
    last = sweep.cells[-1]
    assert last.name == "fedavg-alpha=0.5-seed=3"
    assert last.labels == {"method": "fedavg", "alpha": "0.5", "seed": "3"}
    config = last.config
    assert (config.strategy, config.alpha, config.seed) == ("fedavg", 0.5, 3)
    assert (config.rounds, config.lr) == (3, 0.05)
    assert (config.run_dir, config.run_name) == (str(tmp_path / "out"), last.name)
    assert sweep.cells[0].config.generator == "sketch"
    assert group(sweep.cells)[("flite", "0.1")] == list(sweep.cells[:3])


def test_runs_go_below_runs_under_the_files_stem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(swept("seed = [1]"))
    assert read_sweep(path).out == tmp_path / "runs" / "mine"


def test_overrides_apply_to_every_cell_and_the_file_yields_to_them(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, GRID, {"lr": 0.5, "local-epochs": 5})
    assert {(cell.config.lr, cell.config.local_epochs) for cell in sweep.cells} == {(0.5, 5)}


def test_only_narrows_a_list_and_keeps_the_names(tmp_path: Path) -> None:
    only = parse_only(["seed=3,7", "method=fedavg", "alpha=1e-1"])
    sweep = sweep_of(tmp_path, GRID, only=only)
    assert [cell.name for cell in sweep.cells] == [
        "fedavg-alpha=0.1-seed=7",
        "fedavg-alpha=0.1-seed=3",
    ]
    comma = swept('frozen = ["blocks.0.*, head.*", "query-key"]', "warmup-rounds = 1")
    chosen = sweep_of(tmp_path, comma, only={"frozen": ["blocks.0.*, head.*"]})
    assert [cell.config.frozen for cell in chosen.cells] == ["blocks.0.*, head.*"]


def test_names_are_of_values_and_safe_for_files(tmp_path: Path) -> None:
    text = swept(
        'compression = ["topk:0.01", "none"]\n'
        'how = [{strategy = "fedprox", proximal-mu = 0.1}, {name = "a b/ü", strategy = "fedavg"}]'
    )
    assert [cell.name for cell in sweep_of(tmp_path, text).cells] == [
        "compression=topk-0.01-fedprox-0.1",
        "compression=topk-0.01-a-b",
        "compression=none-fedprox-0.1",
        "compression=none-a-b",
    ]
    assert safe_name("../x") == "x" and safe_name("-/-") == ""


def test_a_group_need_not_set_a_key_that_the_file_gives_for_the_others(tmp_path: Path) -> None:
    text = swept(
        'm = [{name = "a", strategy = "fedavg"}, {name = "b", strategy = "scaffold", lr = 0.5}]',
        "lr = 0.1",
    )
    assert [cell.config.lr for cell in sweep_of(tmp_path, text).cells] == [0.1, 0.5]


# --- refusals ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 3", r"has no \[sweep\]; `fedfrozen run` runs it"),
        ("sweep = 3", "must be a table of lists, got 3"),
        ("[sweep]", "must be a table of lists"),
        (swept("seed = 3"), "sweep.seed must be a list of one or more values, got 3"),
        (swept("seed = []"), r"sweep.seed must be a list of one or more values, got \[\]"),
        (swept("seed = [[1]]"), r"sweep.seed takes strings, numbers or booleans, got \[1\]"),
        (swept("seeds = [1]"), "unknown config key 'seeds'; did you mean 'seed'"),
        (swept("m = [{lrr = 1}]"), "unknown config key 'lrr'; did you mean 'lr'"),
        (swept("m = [{lr = 1}, 2]"), "unknown config key 'm'"),
        (swept("m = [{lr = [1]}]"), r"sweep.m.lr takes strings.*got \[1\]"),
        (swept('m = [{name = "a"}]'), "needs a config key and a name"),
        (swept('m = [{name = "--", lr = 1}]'), "needs a config key and a name"),
        (swept("lr = [{lr = 1}]"), "holds tables and 'lr' is a config key"),
        (swept("seed = [1, 2, 1]"), "two values of sweep.seed are called 'seed=1'"),
        (swept('m = [{name = "A", lr = 1}, {name = "a", lr = 2}]'), "of sweep.m are called 'a'"),
        (swept("m = [{lr = 1}]\nlr = [2, 3]"), "sweep.m and sweep.lr both set lr"),
        (swept("seed = [1]", "seed = 4"), "seed=4 has no effect, as sweep.seed always sets it"),
        (swept('run-name = ["a"]'), "run-name is chosen by the sweep"),
        (swept("seed = [1]", 'run-dir = "x"'), "run-dir is chosen by the sweep"),
        (swept("seed = [1]", "seeed = 4"), "unknown config key 'seeed'"),
        (swept('frozen = ["auto", "query-key"]'), "frozen=auto and .* are the same run"),
        (swept("threads = [1, 2]"), "threads=1 and threads=2 are the same run"),
        (
            swept(
                'a = [{name = "x", lr = 1}, {name = "x-y", lr = 2}]\n'
                'b = [{name = "y-z", rounds = 1}, {name = "z", rounds = 2}]'
            ),
            "two runs are called 'x-y-z'",
        ),
        (swept(f'data-dir = ["{"d" * 201}"]', 'dataset = "cifar10"'), "is too long"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep_of(tmp_path, text)


def test_every_bad_cell_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        sweep_of(tmp_path, swept("lr = [0.1, -1.0]\nbatch-size = [0, 8]\nseed = [1]"))
    lines = str(raised.value).splitlines()
    assert lines[0] == "3 of 4 runs cannot be:"
    assert [line.split(": ")[0].strip() for line in lines if "seed=1" in line] == [
        "lr=0.1-batch-size=0-seed=1",
        "lr=-1.0-batch-size=0-seed=1",
        "lr=-1.0-batch-size=8-seed=1",
    ]
    assert "lr: should be greater than 0, got -1.0" in str(raised.value)
    assert "batch-size: should be greater than or equal to 1, got 0" in str(raised.value)


def test_a_swept_key_cannot_be_overridden_nor_an_unknown_one(tmp_path: Path) -> None:
    for key in ("alpha", "strategy", "generator"):
        with pytest.raises(ConfigError, match=f"{key} is swept by sweep.*--only"):
            sweep_of(tmp_path, GRID, {key: 1})
    with pytest.raises(ConfigError, match="unknown config key 'alhpa'"):
        sweep_of(tmp_path, GRID, {"alhpa": 1})
    with pytest.raises(ConfigError, match="use --out for the folder"):
        sweep_of(tmp_path, GRID, {"run-dir": "x"})


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["seed"], "--only takes label=value"),
        (["seed="], "--only takes label=value"),
        (["sed=1"], "no label; did you mean 'seed'"),
        (["seed=4"], "'4', which is no value of sweep.seed; there are 7, 5, 3"),
        (["method=flit"], "did you mean 'flite'"),
        (["seed=3,"], "no value of sweep.seed"),
    ],
)
def test_only_names_what_is_there(tmp_path: Path, only: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep_of(tmp_path, GRID, only=parse_only(only))


# --- done-ness --------------------------------------------------------------------------------
def config_of(tmp_path: Path, **keys: Any) -> RunConfig:
    values = {key.replace("_", "-"): value for key, value in keys.items()}
    return RunConfig.from_mapping({"rounds": 5, "run-dir": str(tmp_path / "out")}, values)


def test_the_same_result_has_the_same_identity_whatever_it_is_called(tmp_path: Path) -> None:
    plain = config_of(tmp_path)
    same = [
        config_of(tmp_path, run_name="x", run_dir="elsewhere", cache_dir="c", threads=3, jobs=2),
        config_of(tmp_path, model="vit-digits", weights="base", frozen="query-key"),
        config_of(tmp_path, warmup_rounds=2),  # 0.4 of 5
        config_of(tmp_path, warmup_ratio=0.4),
        config_of(tmp_path, lr=0.01, public_fraction=0.15),
    ]
    assert {identity(config) for config in same} == {identity(plain)}


def test_whatever_changes_the_result_changes_the_identity(tmp_path: Path) -> None:
    others = [
        {},
        {"seed": 2},
        {"lr": 0.02},
        {"warmup_rounds": 3},
        {"frozen": "value-head"},
        {"strategy": "fedavg"},
        {"precision": "bf16"},
        {"work": "random", "local_steps": "2-9"},
        {"work": "random", "local_steps": "3-9"},
        {"dataset": "cifar10", "data_dir": "/a", "weights": "/w"},
        {"dataset": "cifar10", "data_dir": "/b", "weights": "/w"},
    ]
    found = {identity(config_of(tmp_path, **keys)) for keys in others}
    assert len(found) == len(others)


def test_a_cell_is_done_by_its_config_and_not_by_its_name(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, swept("seed = [1, 2, 3]", "rounds = 5"))
    one, two, three = (cell.config for cell in sweep.cells)
    make_run(one.model_copy(update={"run_name": "other", "threads": 2}))
    make_run(three.model_copy(update={"run_name": two.run_name, "lr": 0.02}))
    assert {name: folder.path.name for name, folder in sweep.finished().items()} == {
        "seed=1": "other"
    }


def test_a_finished_run_is_through_or_diverged(tmp_path: Path) -> None:
    def run(name: str, *lines: RoundMetrics, failure: str = "") -> RunFolder:
        return make_run(config_of(tmp_path, run_name=name), *lines, failure=failure)

    early = (LINE, replace(LINE, round=1))
    assert is_finished(run("through"))
    assert is_finished(run("ended-early-as-asked", *early))
    assert is_finished(run("saved-late", failure="KeyboardInterrupt: "))
    assert not is_finished(run("interrupted", *early, failure="KeyboardInterrupt: "))
    assert not is_finished(run("failed", *early, failure="RuntimeError: no power"))
    assert is_finished(run("diverged", *early, failure="DivergedError: round 2"))
    reason = "QuorumError: 0 of 3 replies are usable; delta/x has non-finite values"
    assert is_finished(run("diverged-clients", *early, failure=reason))
    killed = run("killed")
    (killed.path / "model.safetensors").unlink()
    assert not is_finished(killed)
    torn = run("torn", *early, failure="OSError: no space")
    with (torn.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "ph')
    assert not is_finished(torn)
    (tmp_path / "out" / "not-a-run").mkdir()
    empty = sweep_of(tmp_path, swept("seed = [1]", "rounds = 5")).finished()
    assert [folder.path.name for folder in empty.values()] == ["diverged"]
    (tmp_path / "out" / "diverged" / "config.json").write_text('{"config": {"gone": 1}}')
    after = sweep_of(tmp_path, swept("seed = [1]", "rounds = 5")).finished()
    assert [folder.path.name for folder in after.values()] == ["diverged-clients"]


def test_a_run_that_broke_off_or_got_worse_has_diverged(tmp_path: Path) -> None:
    def diverges(name: str, end: RoundMetrics, failure: str = "") -> bool:
        return has_diverged(
            make_run(config_of(tmp_path, run_name=name), LINE, end, failure=failure)
        )

    assert not diverges("better", replace(LINE, round=5, test_loss=1.0, test_accuracy=0.9))
    assert not diverges("louder", replace(LINE, round=5, test_loss=9.0, test_accuracy=0.9))
    slightly = 1.9 * (LINE.test_loss or 0)
    assert not diverges("below", replace(LINE, round=5, test_loss=slightly, test_accuracy=0.1))
    assert diverges("worse", replace(LINE, round=5, test_loss=9.0, test_accuracy=0.1))
    assert diverges("hopeless", replace(LINE, round=5, test_loss=57.0, test_accuracy=0.13))
    config = config_of(tmp_path, run_name="good-base")
    good = replace(LINE, test_loss=0.06, test_accuracy=0.985)
    end = replace(good, round=5, test_loss=0.13, test_accuracy=0.98)
    assert not has_diverged(make_run(config, good, end))
    assert diverges("nan", replace(LINE, round=5, test_loss=None, test_accuracy=0.9))
    good = replace(LINE, round=2, test_accuracy=0.9)
    assert diverges("off", good, failure="DivergedError: round 3")


# --- tables -------------------------------------------------------------------------------------
def test_a_row_is_the_mean_over_seeds_with_the_bytes_of_a_clients_last_round(
    tmp_path: Path,
) -> None:
    results = []
    for seed, accuracy in ((1, 0.5), (2, 0.75)):
        lines = [
            replace(LINE, bytes_up=0),
            replace(LINE, round=3, clients=3, bytes_up=3000, bytes_down=6000, test_accuracy=0.875),
            replace(LINE, round=4, clients=1, dropped=1, bytes_up=2000, test_accuracy=None),
            replace(
                LINE,
                round=5,
                clients=3,
                dropped=1,
                bytes_up=5000,
                bytes_down=600,
                test_accuracy=accuracy,
            ),
        ]
        results.append(read_result(make_run(config_of(tmp_path, seed=seed), *lines)))
    assert results[0].quality == 0.5 and results[0].best == 0.875
    assert result_row([*results, None]) == [
        "0.6250 +- 0.1768",
        "0.8750 +- 0.0000",
        "2.500 +- 0.000",
        "1.25",  # 5 kB over 3 + 1 clients
        "0.150",
        "0.010",
        "0.007",
        "2.00",
        "2/3",
        "0/2",
    ]
    assert result_row([None])[0] == "-" and result_row([None])[-2:] == ["0/1", "0/0"]


def test_of_text_the_measure_is_perplexity_and_the_best_is_the_smallest(tmp_path: Path) -> None:
    lines = [
        replace(LINE, test_perplexity=90.0),
        replace(LINE, round=2, test_perplexity=61.5),
        replace(LINE, round=5, test_perplexity=81.25),
    ]
    result = read_result(make_run(config_of(tmp_path), *lines))
    assert (result.is_text, result.quality, result.best) == (True, 81.25, 61.5)
    assert result_row([result])[:2] == ["81.25", "61.50"]
    broken = replace(result, quality=float("inf"), loss=None, diverged=True)
    row = result_row([result, broken])
    assert row[0] == "inf" and row[2] == "2.500" and row[-1] == "1/2"


def test_numbers_have_three_digits() -> None:
    values = (0.648, 5.12, 44.64, 357.1, 44_640.0, 0.99951)
    assert [short(value) for value in values] == ["0.648", "5.12", "44.6", "357", "44,640", "1.00"]
    assert spread([1.0], 2) == "1.00" and spread([], 2) == "-"


def test_the_plan_counts_rounds_clients_and_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_cost, "available_cores", lambda: 2)
    text = swept("seed = [1, 2]", "rounds = 3\nnum-clients = 7\nfraction-train = 0.5")
    steps = sweep_of(tmp_path, text, {"local-steps": 5, "batch-size": 11})
    config = steps.cells[0].config
    assert cohort(config) == 3 and examples_per_round(config) == 3 * 5 * 11
    assert plan_summary(steps.cells).startswith(
        "2 to run: 6 rounds, 18 trainings of a client, up to 990 examples, up to "
    )
    lines = [replace(LINE, round=index, seconds_total=10.0) for index in range(3)]
    done = make_run(config, *lines)
    # two rounds of 165 examples and the test before them took 30 s
    said = "90 s at the 11 a second of the runs done"
    assert said in plan_summary(steps.cells, [done]).replace("2 min", "90 s")
    for jobs in (2, 3):  # two cores, one thread each
        assert "45 s at the 22 a second" in plan_summary(steps.cells, [done], jobs)
    epochs = sweep_of(tmp_path, text, {"max-train-examples": 700, "public-fraction": 0.15})
    assert examples_per_round(epochs.cells[0].config) == 510  # 595 rows, 2 epochs, 3 of 7
    everything = sweep_of(tmp_path, text)
    assert examples_per_round(everything.cells[0].config) is None
    assert "examples" not in plan_summary(everything.cells)


# --- the words of a child -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 1e-05), ("lr", 3.0), ("seed", 0), ("nesterov", True), ("local-steps", "2-9"),
     ("local-steps", 4), ("frozen", "a.* !b"), ("weights", "/a b/it's x=1.pt"), ("data-dir", ""),
     ("weights", '"quoted"'), ("weights", "/my data seed=3/x"), ("compression", "topk:0.01")],
)  # fmt: skip
def test_a_word_is_read_as_the_value_that_it_was_made_of(key: str, value: Any) -> None:
    word = format_override(key, value)
    assert parse_overrides([word]) == {key: value}
    assert type(parse_overrides([word])[key]) is type(value)
    assert parse_overrides([f"rounds=3 {word} dataset=x"]) == {
        "rounds": 3,
        key: value,
        "dataset": "x",
    }


def test_a_value_that_no_word_can_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be written on a command line"):
        format_override("weights", "a' b=\" c=1")


def test_an_experiment_of_one_run_sends_a_grid_to_the_sweep(tmp_path: Path) -> None:
    from fedfrozen_app.config_input import read_experiment

    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    with pytest.raises(ConfigError, match="run them all with `fedfrozen sweep`"):
        read_experiment(path)
    assert json.loads(identity(RunConfig.from_mapping({})))["warmup-ratio"] == -1
