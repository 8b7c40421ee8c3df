"""A claim about memory: how many models are alive while a client trains, whatever the cohort."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfrozen_app.training import local
from fedfrozen_app.training.worker import Worker, resident
from tests.engine.run import Run

FC1 = (256, 64)  # of all entries only the four blocks' first MLP weights have this shape
BLOCKS = 4


def models() -> float:
    """How many models the process holds, by the memory of tensors of one shape."""
    held = {
        tensor.untyped_storage().data_ptr()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.shape == FC1
    }
    return len(held) / BLOCKS


@pytest.mark.parametrize(
    ("keys", "before", "stepping"),
    [
        # the model that trains and x, from the second client on the mean, too; the optimiser adds
        # gradients and momentum
        ({"strategy": "fedfrozen", "warmup_rounds": 1}, [2, 3, 3, 2, 3, 3], 5),
        pytest.param({"strategy": "fednova"}, [2, 3, 3, 2, 3, 3], 5, marks=pytest.mark.slow),
        # FedAvgM keeps v, from round 2 on
        pytest.param({"strategy": "fedavgm"}, [2, 3, 3, 3, 4, 4], 6, marks=pytest.mark.slow),
    ],
)
def test_one_reply_is_alive_at_a_time(
    tmp_path: Path,
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    before: list[int],
    stepping: int,
) -> None:
    at_start: list[float] = []
    in_step: list[float] = []
    train, make = Worker.train, local.make_optimizer

    def watched_train(self: Worker, *args: Any, **others: Any) -> Any:
        at_start.append(models())
        return train(self, *args, **others)

    def watched_make(*args: Any) -> torch.optim.Optimizer:
        optimizer = make(*args)
        optimizer.register_step_post_hook(lambda *_: in_step.append(models()))
        return optimizer

    monkeypatch.setattr(Worker, "train", watched_train)
    monkeypatch.setattr(local, "make_optimizer", watched_make)
    resident.cache_clear()
    gc.collect()
    gc.disable()  # what only the collector would free counts
    others = models()  # of earlier tests
    short = {"rounds": 2, "local_steps": 1, "eval_every": 0, "checkpoint_every": 0}
    try:
        Run(tmp_path, cache, **short, **keys)
    finally:
        gc.enable()
    assert [count - others for count in at_start] == before
    assert max(in_step) - others == stepping
