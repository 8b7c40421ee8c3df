"""Flower's differential privacy around active entries and latents: what is clipped and noised."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.strategies import FedAvg, FedAvgM, FedFrozen, UnfitClientsError
from fedfrozen_app.strategies.latent import FedFrozenLatent, LatentConfig
from fedfrozen_app.transport.arrays import to_record
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.payload import open_payload, train_reply
from tests.strategies.federation import QKV, WIDTH, Federation, initial
from tests.strategies.test_latent_strategy import Latents

CLIENTS = 3
CLIP = 0.5
SMALL = LatentConfig(dim=31, rank=3, generator="sketch", seed=7)


def central(rule: Strategy, noise: float = 0.0) -> Strategy:
    return flower.DifferentialPrivacyServerSideFixedClipping(rule, noise, CLIP, CLIENTS)


def clipped(update: torch.Tensor) -> torch.Tensor:
    """Equation of the Gaussian mechanism's clipping: u * min(1, C / ||u||)."""
    return update * min(1.0, CLIP / float(update.norm()))


@pytest.fixture
def latents(tmp_path: Path) -> Latents:
    made = Latents(tmp_path)
    made.step, made.received, made.sent = (lambda client, at: 0.002 * 10**client), {}, {}
    return made


def test_latents_are_clipped_one_by_one_and_then_averaged(latents: Latents) -> None:
    strategy = FedFrozenLatent(central(FedAvg(weighting="uniform")), latent=SMALL)
    latents.run(strategy, rounds=1)
    assert strategy.report.clients == CLIENTS
    updates = [latents.sent[1][client]["z"] for client in range(CLIENTS)]  # z began at zero
    norms = [float(update.norm()) for update in updates]
    assert norms[0] < CLIP < norms[1] < norms[2]  # so that only some are clipped
    torch.testing.assert_close(strategy.z, torch.stack([*map(clipped, updates)]).mean(dim=0))


def test_the_noise_on_latents_is_the_mechanisms_and_nothing_else_moves(latents: Latents) -> None:
    wide = LatentConfig(dim=20_000, rank=3, generator="sketch", seed=7)
    strategy = FedFrozenLatent(central(FedAvg(weighting="uniform"), noise=2.0), latent=wide)
    model, _ = latents.run(strategy, rounds=1)
    updates = [clipped(latents.sent[1][client]["z"]) for client in range(CLIENTS)]
    noise = strategy.z - torch.stack(updates).mean(dim=0)
    assert strategy.z.dtype == torch.float32
    # sigma = noise multiplier * clipping norm / clients; 5 % are 10 standard errors
    assert float(noise.std()) == pytest.approx(2.0 * CLIP / CLIENTS, rel=0.05)
    assert abs(float(noise.mean())) < 5 * float(noise.std()) / math.sqrt(len(noise))
    moved = [name for name, tensor in initial().items() if not torch.equal(model[name], tensor)]
    assert moved == [QKV]


def test_a_warm_up_and_later_latents_with_adaptive_clipping(latents: Latents) -> None:
    wrapped = flower.DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvgM(), 0.1, CLIENTS, initial_clipping_norm=CLIP
    )
    strategy = FedFrozenLatent(wrapped, warmup_rounds=1, latent=SMALL)
    model, traffic = latents.run(strategy, rounds=4)
    assert [sent.bytes_up for sent in traffic[1:]] == [CLIENTS * 4 * SMALL.dim] * 3
    assert all(tensor.isfinite().all() for tensor in model.values())
    assert float(strategy.z.abs().max()) > 0 and strategy.report.dropped == 0


def test_the_clip_of_a_frozen_round_counts_the_active_entries_alone(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(central(FedAvg()), warmup_rounds=0)
    model, _ = federation.run(strategy, rounds=1)
    active = torch.ones(3 * WIDTH, dtype=torch.bool)
    active[: 2 * WIDTH] = False  # query and key rows
    start = initial()
    rows = {QKV: active, QKV.replace("weight", "bias"): active}
    size = sum(int(t.numel()) for t in start.values()) - 2 * WIDTH * (WIDTH + 1)
    steps = [0.1 * (client + 1) for client in range(CLIENTS)]  # on every active entry
    each = [step * min(1.0, CLIP / (step * math.sqrt(size))) for step in steps]
    mean = float(np.average(each, weights=[1, 2, 3]))
    for name, tensor in start.items():
        moved = model[name] - tensor
        if name in rows:
            assert not moved[~rows[name]].any()
            moved = moved[rows[name]]
        torch.testing.assert_close(moved, torch.full_like(moved, mean), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_noise_of_a_frozen_round_leaves_frozen_rows_their_bits(
    seed: int, tmp_path: Path
) -> None:
    federation = Federation(tmp_path)
    model, _ = federation.run(FedFrozen(central(FedAvg(), noise=1.0), warmup_rounds=0), rounds=seed)
    assert torch.equal(model[QKV][: 2 * WIDTH], initial()[QKV][: 2 * WIDTH])
    assert not torch.equal(model[QKV][2 * WIDTH :], initial()[QKV][2 * WIDTH :])


# --- what cannot be ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrapper",
    [
        flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.1, CLIP, CLIENTS),
        flower.DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.1, CLIENTS),
        central(flower.FedAvg()),
    ],
)
def test_a_wrapper_that_latents_cannot_go_with_is_refused(wrapper: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot average latents.*ServerSideFixedClipping"):
        FedFrozenLatent(wrapper)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_latents_are_refused_where_they_would_be_noised(bits: Any) -> None:
    with pytest.raises(ValueError, match=rf"bits={bits} cannot go with .*; set bits=32"):
        FedFrozenLatent(central(FedAvg()), bits=bits)


def test_local_privacy_on_clients_of_latents_ends_the_first_round(tmp_path: Path) -> None:
    app = ClientApp(mods=[LocalDpMod(CLIP, 0.01, 5.0, 0.1)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        payload = open_payload(message, FrozenCache(tmp_path))
        return train_reply(message, {"z": payload.active["z"]}, {"num-examples": 1})

    strategy = FedFrozenLatent(FedAvg(fraction_evaluate=0.0), latent=SMALL)
    with pytest.raises(UnfitClientsError, match=r"round 1: .*LocalDpMod"):
        strategy.start(LocalGrid(app, CLIENTS), to_record(initial()), num_rounds=2)
    assert not strategy.z.any()
