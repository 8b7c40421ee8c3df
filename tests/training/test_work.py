"""work=random: how much a client does is drawn by (seed, round, client)."""

from collections import Counter
from typing import Any

import pytest
import torch

from fedfrozen_app.config import RunConfig
from fedfrozen_app.training.local import LocalTraining, local_work

ROUNDS, CLIENTS = range(1, 14), range(11)


def config(**keys: Any) -> RunConfig:
    return RunConfig.from_mapping({key.replace("_", "-"): value for key, value in keys.items()})


def drawn(config: RunConfig) -> dict[tuple[int, int], LocalTraining]:
    return {(r, c): local_work(config, r, c) for r in ROUNDS for c in CLIENTS}


def test_steps_come_from_the_whole_range_and_no_further() -> None:
    work = drawn(config(work="random", local_steps="3-7"))
    counts = Counter(one.steps for one in work.values())
    assert set(counts) == {3, 4, 5, 6, 7}
    # 143 draws of 5 numbers: 28.6 each on average, standard deviation 4.8
    assert 10 < min(counts.values()) and max(counts.values()) < 48


@pytest.mark.parametrize(("steps", "low"), [("5", 1), (5, 1), ("2-5", 2), ("4-5", 4)])
def test_both_ends_are_reached(steps: Any, low: int) -> None:
    counts = {one.steps for one in drawn(config(work="random", local_steps=steps)).values()}
    assert counts == set(range(low, 6))


def test_epochs_are_drawn_where_no_steps_are_given() -> None:
    work = drawn(config(work="random", local_epochs=4))
    assert {one.epochs for one in work.values()} == {1, 2, 3, 4}
    assert {one.steps for one in work.values()} == {0}  # 0 = epochs count


def test_the_same_run_draws_the_same_and_another_seed_does_not() -> None:
    keys: dict[str, Any] = {"work": "random", "local_steps": "1-20"}
    one, same, other = (drawn(config(seed=seed, **keys)) for seed in (1, 1, 2))
    assert one == same
    assert sum(one[where].steps == other[where].steps for where in one) < 20  # 7 by chance


def test_rounds_and_clients_draw_for_themselves() -> None:
    work = drawn(config(work="random", local_steps="1-20"))
    rows = [tuple(work[r, c].steps for c in CLIENTS) for r in ROUNDS]
    columns = [tuple(work[r, c].steps for r in ROUNDS) for c in CLIENTS]
    assert len(set(rows)) == len(rows) and len(set(columns)) == len(columns)
    swapped = sum(work[a, b].steps == work[b, a].steps for a in range(1, 11) for b in range(1, a))
    assert swapped < 15  # 45 pairs: (round, client) is not (client, round)


def test_a_draw_leaves_the_global_generators_and_the_rest_of_the_settings() -> None:
    keys = config(work="random", local_steps="2-9", lr=0.3, momentum=0.7, batch_size=13)
    before = torch.random.get_rng_state()
    settings = local_work(keys, 3, 5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (settings.lr, settings.momentum, settings.batch_size) == (0.3, 0.7, 13)
    assert LocalTraining.from_config(keys).steps == 9


@pytest.mark.parametrize(
    ("keys", "steps", "epochs"), [({"local_steps": 5}, 5, 2), ({"local_epochs": 3}, 0, 3)]
)
def test_fixed_work_is_the_same_everywhere(keys: dict[str, Any], steps: int, epochs: int) -> None:
    work = drawn(config(**keys))
    assert {(one.steps, one.epochs) for one in work.values()} == {(steps, epochs)}


@pytest.mark.parametrize("work", ["fixed", "random"])
def test_a_latent_has_a_rate_a_decay_and_a_clip_of_its_own(work: str) -> None:
    weights = {"lr": 0.5, "weight_decay": 0.3, "clip_norm": 7.0}
    own = {"latent_lr": 0.2, "latent_weight_decay": 0.4, "latent_clip_norm": 5.0}
    one = config(strategy="latent", work=work, local_steps=5, **weights, **own)
    found = [local_work(one, 3, 2, latent=latent) for latent in (True, False)]
    assert [(w.optimizer, w.lr, w.weight_decay, w.clip_norm) for w in found] == [
        ("adam", 0.2, 0.4, 5.0),
        ("sgd", 0.5, 0.3, 7.0),
    ]
    assert found[0].steps == found[1].steps  # how much is done does not depend on what trains
