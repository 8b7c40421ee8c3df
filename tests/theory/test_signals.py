"""When each signal freezes, on readings written by hand."""

import torch

from fedfrozen_app.theory.signals import Signal, losses_at


def column(*readings: float) -> torch.Tensor:
    return torch.tensor(readings)[:, None]


FLAT = column(*[1.0] * 10)


def test_agreement_freezes_when_three_rounds_on_average_fall_below_the_threshold() -> None:
    falling = column(8, 6, 4, 2, 1, 1, 1, 1, 1, 1)
    # means of three: 8, 7, 6, 4, 2.33, 1.33
    assert Signal("agreement", 3.0).warmup(falling, FLAT).tolist() == [5]
    assert Signal("agreement", 1.5).warmup(falling, FLAT).tolist() == [6]
    assert Signal("agreement", 0.5).warmup(falling, FLAT).tolist() == [10]
    assert Signal("agreement", 0.5, latest=0.8).warmup(falling, FLAT).tolist() == [8]


def test_a_signal_never_reads_fewer_than_three_rounds() -> None:
    low = column(*[0.0] * 10)
    assert Signal("agreement", 1.0).warmup(low, FLAT).tolist() == [3]


def test_movement_is_against_the_largest_so_far_and_rows_are_apart() -> None:
    moves = torch.cat([column(1, 1, 1, 4, 4, 4, 1, 1, 1, 1), FLAT], dim=1)
    # means of three: 1, 1, 1, 2, 3, 4, 3, 2, 1 of 4
    assert Signal("movement", 0.6).warmup(torch.ones(10, 2), moves).tolist() == [8, 10]


def test_fixed_and_never_read_nothing() -> None:
    assert Signal("nothing", latest=0.4).warmup(FLAT, FLAT).tolist() == [4]
    assert Signal("nothing").warmup(FLAT, FLAT).tolist() == [10]
    names = [Signal("nothing").name, Signal("nothing", latest=0.4).name]
    assert names == ["never", "fixed 40%"]


def test_losses_are_read_at_each_runs_own_warmup() -> None:
    losses = torch.arange(12.0).view(4, 3)
    assert losses_at(losses, torch.tensor([0, 3, 1])).tolist() == [0.0, 10.0, 5.0]
