from pathlib import Path

import pytest
import torch
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedfrozen_app.strategies import FedAvg, QuorumError, Update
from fedfrozen_app.strategies.fedavg import weighted_mean
from fedfrozen_app.strategies.sampling import NodesAsTheyCome, sample_cohort
from tests.strategies.federation import Federation, initial


def update(num_examples: float, **arrays: torch.Tensor) -> Update:
    return Update(0, num_examples, arrays, MetricRecord())


def test_two_clients_by_hand() -> None:
    first = update(1, w=torch.tensor([4.0, -8.0]))
    second = update(3, w=torch.tensor([0.0, 4.0]))
    mean = weighted_mean([first, second])
    # (1 * 4 + 3 * 0) / 4 = 1 and (1 * -8 + 3 * 4) / 4 = 1
    assert mean["w"].tolist() == [1.0, 1.0]
    assert first.arrays["w"].tolist() == [4.0, -8.0]  # the reply itself is not written to


def test_an_entry_all_agree_on_keeps_its_bits() -> None:
    value = torch.tensor([0.1, 1e-30, 3e8, -7.7])
    mean = weighted_mean(update(n, w=value.clone()) for n in (3, 5, 7, 11, 13))
    assert torch.equal(mean["w"], value)


def test_the_mean_is_at_least_fp32_wide() -> None:
    mean = weighted_mean(
        update(n, half=torch.tensor([float(n)]).half(), wide=torch.ones(1).double()) for n in (1, 3)
    )
    assert {name: tensor.dtype for name, tensor in mean.items()} == {
        "half": torch.float32,
        "wide": torch.float64,
    }
    assert float(mean["half"]) == 2.5


def test_updates_are_let_go_of_one_by_one() -> None:
    alive = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    peak = 0

    def stream() -> object:
        nonlocal alive, peak
        for _ in range(11):
            tensor = torch.ones(3).as_subclass(Counted)
            alive += 1
            peak = max(peak, alive)
            yield update(1, w=tensor)
            del tensor

    weighted_mean(stream())  # type: ignore[arg-type]
    assert peak <= 3


def test_equals_flower_fedavg_to_1e6(tmp_path: Path) -> None:
    ours, _ = Federation(tmp_path, 5).run(FedAvg(), 3)
    theirs, _ = Federation(tmp_path, 5).run(FlowerFedAvg(), 3)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6)
        assert tensor.dtype == torch.float32


def test_every_client_that_is_sampled_moves_the_mean_by_its_share(tmp_path: Path) -> None:
    after, _ = Federation(tmp_path, 3).run(FedAvg(), 1)
    # clients add .1, .2, .3 with weights 1, 2, 3: (.1 + .4 + .9) / 6
    for name, tensor in initial().items():
        torch.testing.assert_close(after[name] - tensor, torch.full_like(tensor, 1.4 / 6))


def test_the_report_tells_who_took_part(tmp_path: Path) -> None:
    strategy = FedAvg(fraction_train=0.6, seed=5)
    Federation(tmp_path, 5).run(strategy, 1)
    report = strategy.report
    assert (report.cohort, report.clients, report.dropped) == (3, 3, 0)
    members = sample_cohort(range(5), 0.6, 2, seed=5, server_round=1)
    assert report.num_examples == sum(client + 1 for client in members)
    weights = [client + 1 for client in members]
    losses = [0.5 * client for client in members]
    expected = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    assert report.mean("train_loss") == pytest.approx(expected)


def test_cohorts_depend_on_seed_and_round_alone() -> None:
    def draw(seed: int, server_round: int) -> list[int]:
        torch.manual_seed(server_round)
        return sample_cohort(range(101), 0.1, 1, seed=seed, server_round=server_round)

    assert draw(1, 3) == draw(1, 3) == sorted(set(draw(1, 3)))
    assert len(draw(1, 3)) == 10
    assert len({tuple(draw(seed, r)) for seed in (1, 2) for r in (1, 2, 3)}) == 6


@pytest.mark.parametrize(
    ("clients", "fraction", "minimum", "size"),
    [(100, 0.29, 1, 29), (10, 0.05, 1, 1), (10, 0.05, 3, 3), (2, 1.0, 5, 2), (7, 0.5, 1, 3)],
)
def test_cohort_sizes(clients: int, fraction: float, minimum: int, size: int) -> None:
    cohort = sample_cohort(range(clients), fraction, minimum, seed=1, server_round=1)
    assert len(cohort) == size


def test_too_few_usable_replies_end_the_run_and_say_why(tmp_path: Path) -> None:
    def fail(server_round: int, client: int, arrays: object) -> None:
        if client != 1:
            raise RuntimeError(f"client {client} has no power")

    strategy = FedAvg(min_replies=0.5)
    with pytest.raises(QuorumError, match="round 1: 1 of 3 .* 2 are required.*no power"):
        Federation(tmp_path, 3, tamper=fail).run(strategy, 1)
    lenient = FedAvg(min_replies=0.3)
    Federation(tmp_path, 3, tamper=fail).run(lenient, 1)
    assert lenient.report.dropped == 2


def test_missing_nodes_end_in_a_clear_error(tmp_path: Path) -> None:
    grid = Federation(tmp_path, 2).grid
    with pytest.raises(TimeoutError, match="2 of 3 required nodes"):
        NodesAsTheyCome(timeout=0.01, poll_seconds=0.01)(grid, 3)


def test_min_replies_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"min_replies must be in \[0, 1\], got 2"):
        FedAvg(min_replies=2)
