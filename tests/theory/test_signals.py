"""When each signal freezes, on readings written by hand."""

import torch

from fedfrozen_app.theory.signals import Readings, Signal, losses_at


def column(*readings: float) -> torch.Tensor:
    return torch.tensor(readings)[:, None]


FLAT = column(*[1.0] * 10)


def seen(
    agreement: torch.Tensor = FLAT, movement: torch.Tensor = FLAT, loss: torch.Tensor | None = None
) -> Readings:
    return Readings(agreement, movement, column(*[1.0] * 11) if loss is None else loss)


def test_agreement_freezes_when_three_rounds_on_average_fall_below_the_threshold() -> None:
    falling = seen(column(8, 6, 4, 2, 1, 1, 1, 1, 1, 1))
    # means of three: 8, 7, 6, 4, 2.33, 1.33, 1
    assert Signal("agreement", 3.0).warmup(falling).tolist() == [5]
    assert Signal("agreement", 1.5).warmup(falling).tolist() == [6]
    assert Signal("agreement", 0.5).warmup(falling).tolist() == [10]
    assert Signal("agreement", 0.5, latest=0.8).warmup(falling).tolist() == [8]


def test_a_signal_never_reads_fewer_than_three_rounds() -> None:
    assert Signal("agreement", 1.0).warmup(seen(column(*[0.0] * 10))).tolist() == [3]


def test_movement_is_against_the_largest_so_far_and_runs_are_apart() -> None:
    moves = torch.cat([column(1, 1, 1, 4, 4, 4, 1, 1, 1, 1), FLAT], dim=1)
    # means of three: 1, 1, 1, 2, 3, 4, 3, 2, 1, of 4 at most
    readings = Readings(torch.ones(10, 2), moves, torch.ones(11, 2))
    assert Signal("movement", 0.6).warmup(readings).tolist() == [8, 10]


def test_the_loss_freezes_after_three_rounds_in_a_row_above_its_least_by_more_than_the_margin() -> (
    None
):
    loss = column(9, 5, 4, 4.3, 4.3, 3.9, 4.0, 4.2, 4.2, 4.2, 4.2)
    # above 3.9 by 5 %: rounds 7, 8, 9, 10; rounds 3 and 4 are above 4, but only two
    assert Signal("loss", 0.05).warmup(seen(loss=loss)).tolist() == [9]
    assert Signal("loss", 0.0).warmup(seen(loss=loss)).tolist() == [8]
    assert Signal("loss", 0.1).warmup(seen(loss=loss)).tolist() == [10]
    assert Signal("loss", 0.1, latest=0.9).warmup(seen(loss=loss)).tolist() == [9]


def test_fixed_and_never_read_nothing() -> None:
    assert Signal("nothing", latest=0.4).warmup(seen()).tolist() == [4]
    assert Signal("nothing").warmup(seen()).tolist() == [10]
    names = [Signal("nothing").name, Signal("nothing", latest=0.4).name]
    assert names == ["never", "fixed 40%"]


def test_losses_are_read_at_each_runs_own_warmup() -> None:
    losses = torch.arange(12.0).view(4, 3)
    assert losses_at(losses, torch.tensor([0, 3, 1])).tolist() == [0.0, 10.0, 5.0]
