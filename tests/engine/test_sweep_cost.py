"""What a sweep says a run will send is what the run sends."""

from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.runs.sweep_cost import payload
from tests.engine.run import Run, frozen_half


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fedavg", "head": "frozen-orthogonal"},
        {"strategy": "fedfrozen", "warmup_rounds": 1},
        pytest.param({"strategy": "scaffold"}, marks=pytest.mark.slow),
    ],
    ids=lambda keys: keys["strategy"],
)
def test_the_payload_is_known_before_the_run(
    tmp_path: Path, cache: str, keys: dict[str, Any]
) -> None:
    run = Run(tmp_path, cache, **keys)
    sent = sum(line.bytes_up + line.bytes_down for line in run.metrics)
    # what goes once to each client is not counted
    once = [tensor for name, tensor in run.model.items() if name.startswith("head.")]
    if run.config.strategy == "fedfrozen":
        once = list(frozen_half(run).values())
    if run.config.head != "trainable" or run.config.freezes:
        sent -= 3 * sum(tensor.nbytes for tensor in once)
    assert payload(run.config) == sent


def test_latents_are_counted_as_they_are_packed(tmp_path: Path, cache: str) -> None:
    run = Run(
        tmp_path, cache, strategy="latent", generator="sketch", warmup_rounds=1, rounds=2,
        latent_bits=8, latent_dim=33, latent_rank=5,
    )  # fmt: skip
    up = sum(line.bytes_up for line in run.metrics)
    # scale and offset of each tensor travel beside the integers
    assert payload(run.config) == pytest.approx(2 * up, rel=1e-3)
