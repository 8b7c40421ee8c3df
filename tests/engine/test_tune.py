"""Claims about ``tune-warmup``: branches of one warm-up are the runs they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.tune import Tuning, tune_warmup, tuning_config, warmups_of
from fedfrozen_app.training.worker import resident
from tests.engine.run import Run, small_config

QUICK: dict[str, Any] = {
    "num_clients": 3, "rounds": 5, "local_epochs": 1, "batch_size": 16, "max_train_examples": 251,
    "max_test_examples": 23, "weights": "none", "lr": 0.05, "frozen": "query-key",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg": {"strategy": "fedavg"},
    # moments of the server, controls of the clients
    "fedadam": {"strategy": "fedadam", "fraction_train": 0.67},
    "scaffold": {"strategy": "scaffold", "fraction_train": 0.67},
    "feedback": {"strategy": "fedavg", "compression": "topk:0.1"},
    "latent": {"strategy": "latent", "generator": "sketch", "frozen": "query-key"},
}


def tune(root: Path, cache: str, ratios: tuple[float, ...], **keys: Any) -> Tuning:
    config = tuning_config(small_config(root, cache, **{**QUICK, **keys}))
    clients = resident(config).num_clients
    with LocalGrid("fedfrozen_app.client_app:app", clients, config.to_mapping()) as grid:
        return tune_warmup(config, grid, ratios)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "scaffold" else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_every_branch_is_the_run_of_its_own_bit_for_bit(
    tmp_path: Path, cache: str, name: str
) -> None:
    keys = VARIANTS[name]
    tuning = tune(tmp_path, cache, (0.4, 0.8, 1.0), **keys)
    separate = {}
    for one in tuning.candidates:
        own = {**QUICK, **keys, "warmup_rounds": one.warmup_rounds, "validation_fraction": 0.1}
        run = Run(tmp_path / str(one.warmup_rounds), cache, **own)
        last = run.metrics[-1]
        assert (one.validation_loss, one.validation_accuracy) == (
            last.validation_loss,
            last.validation_accuracy,
        )
        assert one.num_bytes == sum(line.bytes_up + line.bytes_down for line in run.metrics)
        separate[one.warmup_rounds] = last.validation_loss or 0.0
    assert [one.warmup_rounds for one in tuning.candidates] == [2, 4, 5]
    assert len(set(separate.values())) == 3  # the freeze makes a difference
    assert tuning.best.warmup_rounds == min(separate, key=lambda warmup: separate[warmup])
    # no state of a client is left behind
    assert not list((Path(cache) / "clients").glob("*"))


def test_five_ratios_cost_three_fifths_of_five_runs(tmp_path: Path, cache: str) -> None:
    tuning = tune(tmp_path, cache, (0.2, 0.4, 0.6, 0.8, 1.0), strategy="fedavg")
    each = tuning.candidates[0].steps
    assert {one.steps for one in tuning.candidates} == {each}
    assert tuning.separate_steps == 5 * each
    # rounds: 5 of the one that never freezes, then 4 + 3 + 2 + 1
    assert tuning.trained_steps == 3 * each


def test_large_states_of_clients_in_files_go_back_too(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"strategy": "scaffold", "fraction_train": 0.67}
    small = tune(tmp_path, cache, (0.4, 0.8), **keys)
    monkeypatch.setattr(
        "fedfrozen_app.transport.client_state.ClientState.__init__.__kwdefaults__",
        {"own_node": True, "limit_bytes": 0},
    )
    assert tune(tmp_path, cache, (0.4, 0.8), **keys).candidates == small.candidates


def test_ratios_that_leave_nothing_to_choose_are_refused() -> None:
    assert warmups_of([0.8, 0.4, 0.41, 1.0], 10) == {4: 0.4, 8: 0.8, 10: 1.0}
    assert warmups_of([0, 0.01], 10) == {0: 0, 1: 0.01}
    with pytest.raises(ConfigError, match=r"ratios must be in \[0, 1\], got 1.5; 1 never freezes"):
        warmups_of([0.5, 1.5], 10)
    with pytest.raises(ConfigError, match="0.5,0.55 of 2 rounds are 1 warm-up; give"):
        warmups_of([0.5, 0.55], 2)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"warmup-rounds": 3, "strategy": "fedfrozen"}, "leave out warmup"),
        ({"strategy": "fedavg", "frozen": "all"}, "name what to freeze"),
        ({"strategy": "fedfrozen", "engine": "flwr"}, "use engine=local, got flwr"),
    ],
)
def test_what_cannot_be_tuned_is_refused_at_once(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tuning_config(RunConfig.from_mapping(keys))


def test_the_command_prints_the_choice_and_writes_the_table(tmp_path: Path, cache: str) -> None:
    keys = [f"{key.replace('_', '-')}={value}" for key, value in QUICK.items()]
    out = tmp_path / "tuning.json"
    words = ["tune-warmup", *keys, "strategy=fedfrozen", f"cache-dir={cache}"]
    done = CliRunner().invoke(app, [*words, "--ratios", "0.4,1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    assert [one["warmup_rounds"] for one in content["candidates"]] == [2, 5]
    assert f"choose warmup-rounds={content['best']['warmup_rounds']} of 5" in done.output
    assert "in separate runs (80%)" in done.output  # 5 and 3 rounds of twice 5
    done = CliRunner().invoke(app, [*words, "--ratios", "a"])
    assert done.exit_code == 2 and "ratios must be numbers such as" in done.output
