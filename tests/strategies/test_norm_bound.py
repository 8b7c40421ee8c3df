"""Claims about the bound on updates: clients add 0.1 (i + 1) to each of 215 numbers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import FedAvg, FedFrozen, QuorumError
from fedfrozen_app.strategies.norm_bound import ImplausibleError, NormBound
from fedfrozen_app.transport.arrays import to_record
from tests.strategies.federation import COUNTER, SHAPES, Federation, initial

NUMBERS = 7 + 147 + 21 + 35 + 5
UNIT = 0.1 * math.sqrt(NUMBERS)  # the norm of client 0's update


def liar(factor: float, first: int = 1) -> Any:
    """Client 2 moves ``factor`` times as far, from round ``first`` on."""

    def tamper(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> Any:
        if client != 2 or server_round < first:
            return None
        return {name: tensor + 0.3 * (factor - 1) for name, tensor in arrays.items()}

    return tamper


def moved(root: Path, rounds: int = 1, factor: float = 1.0, first: int = 1, **bound: str) -> float:
    """By how much the last round moved every number."""
    strategy = FedAvg(
        max_update_norm=bound["limit"], oversized_updates=bound.get("action", "refuse")
    )
    federation = Federation(root, 3, tamper=liar(factor, first))
    before, _ = federation.run(strategy, rounds - 1)
    after, _ = federation.run(strategy, 1, to_record(before), first=rounds)
    deltas = torch.cat([(after[name] - before[name]).flatten() for name in SHAPES])
    assert float(deltas.std()) < 1e-6
    return float(deltas.mean())


HONEST = (1 * 0.1 + 2 * 0.2 + 3 * 0.3) / 6  # weights 1, 2, 3
WITHOUT = (1 * 0.1 + 2 * 0.2) / 3


def test_within_the_bound_nothing_changes(tmp_path: Path) -> None:
    for limit in ("none", str(3.001 * UNIT), "1.6x"):
        assert moved(tmp_path, 2, limit=limit) == pytest.approx(HONEST, rel=1e-5)


def test_an_update_beyond_a_number_is_refused_or_clipped_to_it(tmp_path: Path) -> None:
    limit = str(2.5 * UNIT)
    assert moved(tmp_path, limit=limit) == pytest.approx(WITHOUT, rel=1e-5)
    clipped = (1 * 0.1 + 2 * 0.2 + 3 * 0.25) / 6
    assert moved(tmp_path, limit=limit, action="clip") == pytest.approx(clipped, rel=1e-5)


def test_an_update_beyond_a_multiple_of_the_last_rounds_median_is_refused_or_clipped(
    tmp_path: Path,
) -> None:
    # honest norms are 1, 2, 3 units: the median is 2, five times that 10
    keys: dict[str, Any] = {"rounds": 2, "first": 2, "limit": "5x"}
    assert moved(tmp_path, factor=3.3, **keys) > HONEST  # 9.9 units
    assert moved(tmp_path, factor=3.4, **keys) == pytest.approx(WITHOUT, rel=1e-5)
    clipped = (1 * 0.1 + 2 * 0.2 + 3 * 1.0) / 6
    assert moved(tmp_path, factor=1e6, action="clip", **keys) == pytest.approx(clipped, rel=1e-4)


def test_a_liar_does_not_stretch_the_bound_round_by_round(tmp_path: Path) -> None:
    # a clipped update counts as what it was clipped to: the median stays at 2 units
    assert moved(tmp_path, 6, factor=1e6, first=2, limit="5x", action="clip") == pytest.approx(
        (1 * 0.1 + 2 * 0.2 + 3 * 1.0) / 6, rel=1e-4
    )


def test_the_reason_names_norm_bound_and_key_and_too_few_replies_stop_the_run(
    tmp_path: Path,
) -> None:
    strategy = FedAvg(max_update_norm="0.5", min_replies=0.5)
    words = r"0 of 3.*client 0: the update has norm 1.466, more than 0.5 \(max-update-norm=0.5\)"
    with pytest.raises(QuorumError, match=words):
        Federation(tmp_path, 3).run(strategy, 1)


def test_a_change_of_the_selection_and_a_new_state_begin_anew(tmp_path: Path) -> None:
    strategy = FedAvg(max_update_norm="5x")
    Federation(tmp_path, 3).run(strategy, 1)
    assert strategy.norm_bound.medians == {"model": pytest.approx(2 * UNIT, rel=1e-5)}
    other = FedAvg(max_update_norm="5x")
    other.load_state_dict(strategy.state_dict())
    assert other.norm_bound.medians == strategy.norm_bound.medians
    other.select(Selection.build("query-key", initial()))
    assert other.norm_bound.medians == {}


def test_buffers_are_no_part_of_the_norm_and_are_not_clipped(tmp_path: Path) -> None:
    x = {**initial(), COUNTER: torch.tensor(5)}
    y = {name: tensor + 1 for name, tensor in initial().items()} | {COUNTER: torch.tensor(10**6)}
    bound = NormBound("1.0", "clip")
    found = bound.checked(y, x, ())
    assert int(found[COUNTER]) == 10**6
    expected = 1 / math.sqrt(NUMBERS)
    assert torch.allclose(found["head.bias"] - x["head.bias"], torch.tensor(expected), atol=1e-6)


def test_what_travels_in_a_namespace_is_held_to_its_own_median() -> None:
    x = {"w": torch.zeros(3)}
    bound = NormBound("2x")
    for length in (1.0, 2.0, 3.0):
        bound.checked({"w": torch.ones(3), "control/w": torch.tensor([length, 0, 0])}, x, ())
    bound.accept()
    assert bound.medians == {"model": pytest.approx(math.sqrt(3)), "control": 2.0}
    bound.begin()
    with pytest.raises(ImplausibleError, match="the control has norm 5, more than 4"):
        bound.checked({"w": torch.ones(3), "control/w": torch.tensor([5.0, 0, 0])}, x, ())
    clip = NormBound("2x", "clip", bound.medians)
    found = clip.checked({"w": torch.ones(3), "control/w": torch.tensor([8.0, 0, 0])}, x, ())
    assert found["control/w"].tolist() == [4.0, 0, 0] and found["w"].tolist() == [1.0] * 3


def test_frozen_rounds_are_bounded_too(tmp_path: Path) -> None:
    strategy = FedFrozen(FedAvg(max_update_norm="5x"), warmup_rounds=1, frozen="query-key")
    federation = Federation(tmp_path, 3, tamper=liar(100, first=3))
    federation.run(strategy, 3)  # round 2, the first frozen one, says what is usual
    assert len(strategy.report.refused) == 1
    assert strategy.report.refused[0].startswith("client 2: the update has norm")


@pytest.mark.parametrize("limit", ["0", "-1", "x", "0.5x", "nan", "inf", "big"])
def test_a_limit_that_is_none_is_refused_by_name(limit: str) -> None:
    words = f"max-update-norm must be none, a norm > 0 .* got '{limit}'"
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_mapping({"max-update-norm": limit})
    with pytest.raises(ValueError, match=words):
        FedAvg(max_update_norm=limit)


def test_an_action_without_a_bound_or_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="oversized-updates=clip has no effect with max-update"):
        RunConfig.from_mapping({"oversized-updates": "clip"})
    assert RunConfig.from_mapping({"max-update-norm": 5, "oversized-updates": "clip"})
    with pytest.raises(ValueError, match="oversized-updates must be refuse or clip, got 'cut'"):
        FedAvg(oversized_updates="cut")
