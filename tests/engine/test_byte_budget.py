"""Claims about ``byte-budget``: what a client may spend, and what the run says at its end."""

from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.config import ConfigError, RunConfig
from tests.engine.run import Run

QUICK: dict[str, Any] = {
    "num_clients": 3, "rounds": 5, "local_steps": 1, "batch_size": 7, "max_train_examples": 60,
    "max_test_examples": 23, "weights": "none",
}  # fmt: skip


def run(tmp_path: Path, cache: str, **keys: Any) -> Run:
    return Run(tmp_path, cache, **{**QUICK, **keys})


def test_a_run_ends_before_the_round_that_a_client_cannot_pay(tmp_path: Path, cache: str) -> None:
    whole = run(tmp_path / "whole", cache, strategy="fedavg", rounds=1)
    each = (whole.metrics[1].bytes_up + whole.metrics[1].bytes_down) // 3
    for budget, rounds in ((3 * each, 3), (3 * each - 1, 2), (each - 1, 0), (9 * each, 5)):
        short = run(tmp_path / str(budget), cache, strategy="fedavg", byte_budget=budget)
        assert [line.round for line in short.metrics] == list(range(rounds + 1))
        spent = sum(line.bytes_up + line.bytes_down for line in short.metrics)
        assert spent == 3 * rounds * each <= 3 * budget
        assert short.metrics[-1].test_accuracy is not None
        assert (short.folder.path / "model.safetensors").exists()
        assert short.folder.failure() is None
        reason = short.folder.early_end()
        if rounds == 5:
            assert reason is None
        else:
            assert reason == (
                f"byte-budget={budget}: client 0 has spent {rounds * each} bytes and round "
                f"{rounds + 1} takes {each}"
            )


def test_a_frozen_round_is_cheaper_and_the_codec_counts(tmp_path: Path, cache: str) -> None:
    keys = {"strategy": "fedavg", "compression": "int4", "broadcast": "int8"}
    whole = run(tmp_path / "whole", cache, **keys, rounds=1)
    each = (whole.metrics[1].bytes_up + whole.metrics[1].bytes_down) // 3
    short = run(tmp_path / "short", cache, **keys, byte_budget=2 * each)
    assert [line.round for line in short.metrics] == [0, 1, 2]
    # the base travels once, then 1,088 latents each way
    latent = {"strategy": "latent", "generator": "sketch", "head": "frozen-orthogonal"}
    whole = run(tmp_path / "first", cache, **latent, rounds=1)
    first = (whole.metrics[1].bytes_up + whole.metrics[1].bytes_down) // 3
    short = run(tmp_path / "latent", cache, **latent, byte_budget=first + 2 * 2 * 4 * 1088)
    assert [line.round for line in short.metrics] == [0, 1, 2, 3]


def test_only_the_clients_of_a_round_must_pay_for_it(tmp_path: Path, cache: str) -> None:
    whole = run(tmp_path / "whole", cache, strategy="fedavg", rounds=1)
    each = (whole.metrics[1].bytes_up + whole.metrics[1].bytes_down) // 3
    keys = {"strategy": "fedavg", "fraction_train": 0.3, "rounds": 9}
    short = run(tmp_path / "short", cache, **keys, byte_budget=2 * each)
    # one client a round: somebody's third turn comes after more than two rounds
    assert 2 < short.metrics[-1].round < 7
    assert "has spent" in (short.folder.early_end() or "")


def test_an_untested_last_round_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="untested; set eval-every=1"):
        RunConfig.from_mapping({"byte-budget": 10**6, "eval-every": 2})
