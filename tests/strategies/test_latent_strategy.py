"""FedFrozen-Latent over clients that add known numbers to the weights or the latent they get."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.freeze import freeze_
from fedfrozen_app.models.latent import LatentTraining, identity_error
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedFrozen,
    FedNova,
    FedProx,
    FreezeSchedule,
    QuorumError,
    Scaffold,
    ServerRule,
)
from fedfrozen_app.strategies.latent import FedFrozenLatent, LatentConfig
from fedfrozen_app.training.local import LocalTraining, train
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.codecs import Codecs
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.payload import (
    MissingFrozenBlock,
    missing_reply,
    open_payload,
    train_reply,
)
from tests.strategies.federation import (
    HEAD,
    QKV,
    WHOLE_BYTES,
    WIDTH,
    Federation,
    initial,
    without_empty_block,
)
from tests.strategies.learners import sequences, small_transformer

DIM, RANK = 5, 3
SMALL = LatentConfig(dim=DIM, rank=RANK, generator="sketch", seed=7)
Tensors = dict[str, torch.Tensor]
Step = Callable[[int, int], float]  # of a client in a round


def by_client(client: int, server_round: int) -> float:
    """A step that tells clients and rounds apart, with both signs."""
    return 0.01 * (client + 1) * (server_round if server_round % 2 == 0 else -server_round)


class Latents(Federation):
    """Clients 0..n-1, n_i = i + 1, of which client i adds step(i, round) and a ramp.

    Weights get the step alone, as in ``Federation``; of a latent entry j gets (1 + j) steps, so
    that no two entries agree.
    """

    step: Step = staticmethod(by_client)
    received: dict[int, dict[int, Tensors]]
    sent: dict[int, dict[int, Tensors]]
    drops: frozenset[tuple[int, int]] = frozenset()  # (round, client) whose reply is unusable

    def train(self, message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        server_round = int(message.content["config"]["server-round"])
        try:
            payload = open_payload(message, self.cache(client))
        except MissingFrozenBlock as missing:
            self.seen.append((server_round, client, "missing"))
            return missing_reply(message, str(missing))
        self.seen.append((server_round, client, payload.selection))
        step = self.step(client, server_round)
        arrays = {
            name: x + step * (1 + torch.arange(len(x)) if payload.latent else 1)
            for name, x in payload.active.items()
        }
        if (server_round, client) in self.drops:
            arrays = {name: x * float("nan") for name, x in arrays.items()}
        for kept, what in ((self.received, payload.active), (self.sent, arrays)):
            kept.setdefault(server_round, {})[client] = copy.deepcopy(what)
        up = Codecs.of_message(payload.config).up
        encoded = arrays if up is None else up.encode(arrays)
        return train_reply(message, encoded, {"num-examples": client + 1, "steps": 1})


@pytest.fixture
def clients(tmp_path: Path) -> Callable[..., Latents]:
    """A federation with caches of its own."""
    count = iter(range(100))

    def make(step: Step = by_client, **options: Any) -> Latents:
        made = Latents(tmp_path / str(next(count)), **options)
        made.step, made.received, made.sent = step, {}, {}
        return made

    return make


def flite(rule: ServerRule[Any, Any] | None = None, **options: Any) -> FedFrozenLatent:
    return FedFrozenLatent(rule, **{"latent": SMALL, **options})


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def theta(z: torch.Tensor, base: Tensors, frozen: str = "all") -> Tensors:
    """The whole model of a latent, put together apart from the strategy."""
    whole = copy.deepcopy(base)
    SMALL.mapping(Selection.build(frozen, base)).apply_(whole, base, z)
    return whole


# --- the warm-up ------------------------------------------------------------------------
RULES: dict[str, Callable[[], ServerRule[Any, Any]]] = {
    "fedavg": FedAvg,
    "fedavgm": lambda: FedAvgM(server_momentum=0.8),
    "fedadam": lambda: FedAdam(server_lr=0.1),
    "fedprox": lambda: FedProx(proximal_mu=0.1),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_warmup_as_long_as_the_run_is_the_rule_bit_for_bit(
    clients: Callable[..., Latents], rule: str
) -> None:
    plain, plain_traffic = clients().run(RULES[rule](), 3)
    strategy = flite(RULES[rule](), warmup_rounds=3)
    model, traffic = clients().run(strategy, 3)
    assert same(model, plain) and not same(model, initial())
    assert [without_empty_block(each, 3) for each in traffic] == plain_traffic
    assert strategy.mapping is None and strategy.identity_error is None


def test_the_default_warms_up_as_an_unweighted_fedavg(clients: Callable[..., Latents]) -> None:
    warm, _ = clients().run(flite(warmup_rounds=2), 2)
    uniform, _ = clients().run(FedAvg(weighting="uniform"), 2)
    weighted, _ = clients().run(FedAvg(), 2)
    assert same(warm, uniform) and not same(warm, weighted)


def test_the_base_of_the_latents_is_the_model_at_the_freeze(
    clients: Callable[..., Latents],
) -> None:
    strategy, federation = flite(warmup_rounds=2), clients()
    model, _ = federation.run(strategy, 3)
    at_freeze, _ = clients().run(FedAvg(weighting="uniform"), 2)
    assert strategy.state.block is not None
    assert same(strategy.state.block.tensors, at_freeze)
    assert all(not z["z"].count_nonzero() for z in federation.received[3].values())
    assert not torch.equal(model[QKV], at_freeze[QKV])
    assert [strategy.is_frozen(server_round) for server_round in (1, 2, 3)] == [False, False, True]


# --- what latents do --------------------------------------------------------------------
def test_where_no_client_moves_the_model_is_the_base_bit_for_bit(
    clients: Callable[..., Latents],
) -> None:
    base = initial()
    base[QKV][0, 0] = -0.0
    model, _ = clients(lambda *_: 0.0).run(flite(), 2, to_record(copy.deepcopy(base)))
    assert {n: t.numpy().tobytes() for n, t in model.items()} == {
        n: t.numpy().tobytes() for n, t in base.items()
    }


@pytest.mark.parametrize("frozen", ["all", "query-key"])
def test_the_model_is_the_mean_of_the_models_of_the_clients(
    clients: Callable[..., Latents], frozen: str
) -> None:
    federation, strategy, base = clients(), flite(frozen=frozen), initial()
    arrays = to_record(copy.deepcopy(base))
    for server_round in (1, 2):
        arrays, _ = federation.round(strategy, server_round, arrays)
        zs = [federation.sent[server_round][client]["z"] for client in range(3)]
        model = to_tensors(arrays)
        torch.testing.assert_close(strategy.z, torch.stack(zs).mean(0), rtol=0, atol=1e-8)
        thetas = [theta(z, base, frozen) for z in zs]
        for name, tensor in model.items():
            mean = torch.stack([one[name] for one in thetas]).double().mean(0)
            assert (tensor - mean).abs().max() <= 2.4e-7  # one unit in the last place of 2 to 4
        assert same(model, theta(strategy.z, base, frozen))
        assert (model[QKV] - base[QKV]).abs().max() > 1e-3
    received = [z["z"] for z in federation.received[2].values()]
    mean_of_one = torch.stack([z["z"] for z in federation.sent[1].values()]).mean(0)
    for z in received:
        torch.testing.assert_close(z, mean_of_one, rtol=0, atol=1e-8)


def test_a_weighted_mean_is_asked_for_by_name(clients: Callable[..., Latents]) -> None:
    federation, strategy = clients(), flite(weighting="examples")
    federation.run(strategy, 1)
    # steps -0.01, -0.02, -0.03 with weights 1, 2, 3: 0.14 / 6, against 0.02 unweighted
    expected = -(0.14 / 6) * (1 + torch.arange(DIM))
    torch.testing.assert_close(strategy.z, expected, rtol=0, atol=1e-8)


def test_only_what_is_mapped_moves(clients: Callable[..., Latents]) -> None:
    at_freeze, _ = clients().run(FedAvg(weighting="uniform"), 1)
    for rounds in (2, 3, 4):
        model, _ = clients().run(flite(warmup_rounds=1), rounds)
        moved = [name for name in model if not torch.equal(model[name], at_freeze[name])]
        assert moved == [QKV]  # no norm, no bias, no head
        assert (model[QKV] != at_freeze[QKV]).all(dim=1).sum() > 2 * WIDTH


def test_a_frozen_kernel_leaves_the_value_rows_to_the_latent(
    clients: Callable[..., Latents],
) -> None:
    strategy = flite(frozen="query-key", warmup_rounds=1)
    model, _ = clients().run(strategy, 3)
    at_freeze, _ = clients().run(FedAvg(weighting="uniform"), 1)
    assert strategy.mapping is not None
    assert [(t.start, t.stop) for t in strategy.mapping.tensors] == [(2 * WIDTH, 3 * WIDTH)]
    assert torch.equal(model[QKV][: 2 * WIDTH], at_freeze[QKV][: 2 * WIDTH])
    rows = (model[QKV] != at_freeze[QKV])[2 * WIDTH :]
    assert rows.any(dim=1).all()
    assert all(torch.equal(model[name], at_freeze[name]) for name in model if name != QKV)


def test_what_the_schedule_never_trains_rests_in_the_warmup_too(
    clients: Callable[..., Latents],
) -> None:
    schedule = FreezeSchedule.warmup(1, "all", always="head.*")
    strategy = FedFrozenLatent(schedule=schedule, latent=SMALL)
    model, _ = clients().run(strategy, 3)
    assert torch.equal(model[HEAD], initial()[HEAD])
    assert not torch.equal(model["norm.weight"], initial()["norm.weight"])  # in the warm-up
    assert [strategy.is_frozen(server_round) for server_round in (1, 2)] == [False, True]


# --- the rule inside --------------------------------------------------------------------
def test_server_momentum_acts_on_latents_and_starts_afresh_at_the_freeze(
    clients: Callable[..., Latents],
) -> None:
    strategy = flite(FedAvgM(server_momentum=0.5), warmup_rounds=2)
    federation = clients(lambda client, server_round: 0.01)
    federation.run(strategy, 4)
    # every client moves by g a round: v = -g, z = g; then v = -1.5 g, z = 2.5 g
    g = 0.01 * (1 + torch.arange(DIM))
    torch.testing.assert_close(federation.received[4][0]["z"], g, rtol=0, atol=1e-8)
    torch.testing.assert_close(strategy.z, 2.5 * g, rtol=0, atol=1e-7)
    assert list(strategy.strategy.state.v) == ["z"]  # type: ignore[attr-defined]


def test_a_reply_that_is_refused_does_not_count(clients: Callable[..., Latents]) -> None:
    federation, strategy = clients(), flite()
    federation.drops = frozenset({(1, 0), (2, 0), (2, 1), (2, 2)})
    arrays, _ = federation.round(strategy, 1, to_record(initial()))
    first = strategy.z.clone()
    torch.testing.assert_close(first, -0.025 * (1 + torch.arange(DIM)), rtol=0, atol=1e-8)
    again, _ = federation.round(strategy, 2, arrays)  # nobody: the model stays
    assert torch.equal(strategy.z, first) and strategy.report.dropped == 3
    assert same(to_tensors(again), theta(first, initial()))
    federation.drops = frozenset({(1, 0)})
    with pytest.raises(QuorumError):
        federation.round(flite(min_replies=0.9), 1, to_record(initial()))


# --- bytes ------------------------------------------------------------------------------
def test_the_base_goes_out_once_and_then_only_latents(clients: Callable[..., Latents]) -> None:
    _, traffic = clients().run(flite(warmup_rounds=1), 4)
    assert [one.bytes_up for one in traffic] == [3 * WHOLE_BYTES, *[3 * 4 * DIM] * 3]
    assert [one.bytes_down for one in traffic] == [
        3 * WHOLE_BYTES,
        3 * (4 * DIM + WHOLE_BYTES),
        3 * 4 * DIM,
        3 * 4 * DIM,
    ]


def test_a_client_that_lost_the_base_gets_it_in_the_same_round(
    clients: Callable[..., Latents],
) -> None:
    federation, strategy = clients(), flite()
    arrays = to_record(initial())
    for server_round in (1, 2):
        arrays, _ = federation.round(strategy, server_round, arrays)
    federation.cache(1).path(strategy.digest).unlink()
    arrays, traffic = federation.round(strategy, 3, arrays)
    assert federation.seen[-4:] == [(3, 0, "all"), (3, 1, "missing"), (3, 1, "all"), (3, 2, "all")]
    assert traffic.bytes_down == 4 * 4 * DIM + WHOLE_BYTES
    assert traffic.bytes_up == 3 * 4 * DIM
    assert strategy.report.dropped == 0
    undisturbed, _ = clients().run(flite(), 3)
    assert same(to_tensors(arrays), undisturbed)


@pytest.mark.parametrize(("bits", "size"), [(32, 4 * DIM), (8, DIM + 8), (4, 3 + 8)])
def test_bits_are_of_the_latent_in_both_directions_and_of_nothing_else(
    clients: Callable[..., Latents], bits: Literal[32, 8, 4], size: int
) -> None:
    # an odd number of 4-bit integers, one scale and one zero point of 4 bytes each
    federation, strategy = clients(), flite(warmup_rounds=1, bits=bits)
    _, traffic = federation.run(strategy, 3)
    assert [one.bytes_up for one in traffic] == [3 * WHOLE_BYTES, 3 * size, 3 * size]
    assert [one.bytes_down for one in traffic] == [
        3 * WHOLE_BYTES,
        3 * (size + WHOLE_BYTES),
        3 * size,
    ]
    zs = torch.stack([federation.sent[3][client]["z"] for client in range(3)])
    span = zs.max(dim=1).values - zs.min(dim=1).values
    half_a_step = 1e-7 if bits == 32 else span / (2**bits - 1) / 2 * 1.01
    off = (strategy.z - zs.mean(0)).abs().max()
    assert off <= (half_a_step if bits == 32 else float(half_a_step.mean()))
    assert (off > 1e-6) == (bits < 32)
    # the identity holds for what the server makes of the replies
    assert strategy.identity_error is not None and strategy.identity_error <= 2.4e-7


# --- the identity -----------------------------------------------------------------------
def test_the_identity_error_is_measured_and_logged_once(
    clients: Callable[..., Latents], caplog: pytest.LogCaptureFixture
) -> None:
    federation, strategy = clients(), flite(warmup_rounds=1)
    federation.drops = frozenset({(2, client) for client in range(3)})  # the first that counts: 3
    with caplog.at_level("INFO", logger="flwr"):
        federation.run(strategy, 5)
    assert strategy.identity_round == 3 and strategy.identity_error is not None
    lines = [line for line in caplog.messages if "identity error" in line]
    assert lines == [f"round 3: identity error {strategy.identity_error:.1e}"]
    assert strategy.mapping is not None and strategy.state.block is not None
    zs = [federation.sent[3][client]["z"] for client in range(3)]
    measured = identity_error(strategy.mapping, strategy.state.block.tensors, zs)
    assert 0 < strategy.identity_error == measured <= 2.4e-7
    assert federation.sent[3][0]["z"].abs().max() > 0.01


def test_below_one_the_identity_holds_to_1e_7(clients: Callable[..., Latents]) -> None:
    small = {name: 0.2 * tensor for name, tensor in initial().items()}
    assert max(float(tensor.abs().max()) for tensor in small.values()) < 1
    for generator in ("gaussian-qr", "sketch"):
        latent = LatentConfig(dim=DIM, rank=RANK, generator=generator, seed=7)
        strategy = flite(latent=latent)
        model, _ = clients().run(strategy, 1, to_record(copy.deepcopy(small)))
        assert strategy.identity_error is not None and strategy.identity_error <= 1e-7
        assert not torch.equal(model[QKV], small[QKV])


# --- state ------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["fedavg", "fedavgm", "fedadam"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_restored_run_equals_the_uninterrupted_one(
    clients: Callable[..., Latents], rule: str, stop: int
) -> None:
    # stop 1 lies in the warm-up, 2 at the freeze, 3 and 4 among latents
    def strategy() -> FedFrozenLatent:
        return flite(RULES[rule](), warmup_rounds=2)

    whole, first, rest = strategy(), strategy(), strategy()
    model, traffic = clients().run(whole, 5)
    federation = clients()
    at_stop, _ = federation.run(first, stop)
    rest.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed, later = federation.run(rest, 5 - stop, to_record(at_stop), first=stop + 1)
    assert same(resumed, model) and torch.equal(rest.z, whole.z)
    assert later == traffic[stop:]
    assert rest.identity_error == whole.identity_error is not None
    assert rest.identity_round == whole.identity_round == 3


@pytest.mark.parametrize("bits", [32, 4])
def test_an_object_goes_back_to_a_warmup_that_was_saved(
    clients: Callable[..., Latents], bits: int
) -> None:
    strategy, federation = flite(warmup_rounds=2, bits=bits), clients()
    after_one, _ = federation.run(strategy, 1)
    saved = copy.deepcopy(strategy.state_dict())
    arrays = to_record(copy.deepcopy(after_one))
    model, _ = federation.run(strategy, 3, to_record(after_one), first=2)
    strategy.load_state_dict(saved)
    again, _ = federation.run(strategy, 3, arrays, first=2)
    assert same(again, model)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_second_run_has_a_base_of_its_own(clients: Callable[..., Latents], bits: int) -> None:
    rule = FedAvg(weighting="uniform", fraction_evaluate=0.0)
    strategy = flite(rule, warmup_rounds=1, bits=bits)
    first = strategy.start(clients().grid, to_record(initial()), num_rounds=3).arrays
    assert strategy.identity_error is not None and strategy.identity_round == 2
    strategy.identity_error = 1.0
    other = initial(seed=5)
    second = strategy.start(clients().grid, to_record(copy.deepcopy(other)), num_rounds=3).arrays
    expected, _ = clients().run(flite(warmup_rounds=1, bits=bits), 3, to_record(other))
    assert same(to_tensors(second), expected)
    assert not torch.equal(to_tensors(second)[QKV], to_tensors(first)[QKV])
    assert strategy.identity_error < 1e-6  # measured again


def test_another_seed_is_another_map(clients: Callable[..., Latents]) -> None:
    def run(seed: int, generator: Literal["gaussian-qr", "sketch"]) -> torch.Tensor:
        latent = LatentConfig(dim=DIM, rank=RANK, generator=generator, seed=seed)
        return clients().run(flite(latent=latent), 1)[0][QKV]

    for generator in ("gaussian-qr", "sketch"):
        assert torch.equal(run(1, generator), run(1, generator))
        assert not torch.equal(run(1, generator), run(2, generator))
    assert not torch.equal(run(1, "gaussian-qr"), run(1, "sketch"))


# --- a project of one's own --------------------------------------------------------------
def test_a_users_own_client_trains_latents_as_the_readme_says(tmp_path: Path) -> None:
    app, examples = ClientApp(), sequences()
    latent = LatentConfig(dim=31, rank=29, seed=7)

    @app.train()
    def train_latent(message: Message, context: Context) -> Message:
        payload = open_payload(message, FrozenCache(tmp_path))
        assert payload.latent and payload.frozen is not None
        model = small_transformer()
        model.load_state_dict(payload.frozen)
        selection = Selection.build(payload.selection, model.state_dict())
        mapping = LatentConfig.from_text(payload.latent).mapping(selection)
        freeze_(model, mapping.selection)
        training = LatentTraining(mapping, model, payload.active["z"], payload.frozen)
        client = int(context.node_config["partition-id"])
        settings = LocalTraining(steps=7, batch_size=17, optimizer="adam", lr=0.1)
        result = train(
            model, examples[client], settings, seed=3, server_round=1, partition_id=client,
            latent=training,
        )  # fmt: skip
        losses.append(result.train_loss)
        z = training.latent.detach()
        return train_reply(message, {"z": z}, {"num-examples": result.num_examples})

    losses: list[float] = []
    strategy = FedFrozenLatent(FedAvgM(server_momentum=0.0, fraction_evaluate=0.0), latent=latent)
    base = {name: tensor.clone() for name, tensor in small_transformer().state_dict().items()}
    result = strategy.start(LocalGrid(app, 4), to_record(base), num_rounds=7)
    assert strategy.report.dropped == 0
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    model = to_tensors(result.arrays)
    assert [name for name in base if not torch.equal(model[name], base[name])] == [QKV]
    assert 0 < float(strategy.z.abs().max())


# --- refusals ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule", [Scaffold(num_clients=3), FedNova(), FlowerFedAvg(), FedFrozen(), object()]
)
def test_a_rule_that_cannot_average_latents_is_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(rule).__name__} cannot average latents.*FedAvgM"):
        flite(rule)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 5}, "bits must be 32, 8 or 4, got 5"),
        ({"value_l2": 0.1}, "value_l2=0.1 acts on weights .*set value_l2=0"),
        ({"warmup_rounds": -1}, "warmup_rounds must be >= 0, got -1"),
        ({"warmup_ratio": 0.5}, "one of warmup_rounds, warmup_ratio and schedule"),
        ({"strategy": FedAvg(), "weighting": "uniform"}, r"\['weighting'\] belong to the default"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FedFrozenLatent(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 3, "rank": 5}, r"rank must be in 1\.\.dim=3, got 5; lower it or raise dim"),
        ({"rank": 0}, "rank must be in 1.*got 0"),
        ({"generator": "dense"}, "generator must be gaussian-qr or sketch, got 'dense'"),
        ({"memory": "none"}, "memory must be stored or regenerated, got 'none'"),
    ],
)
def test_a_map_that_cannot_be_is_refused_when_it_is_named(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LatentConfig(**options)


def test_what_a_message_says_of_the_map_is_short_and_complete() -> None:
    assert LatentConfig(seed=3).to_text() == "gaussian-qr/64/32/3"
    assert SMALL.to_text() == "sketch/5/3/7"
    for latent in (LatentConfig(), SMALL, LatentConfig(memory="regenerated", seed=2**64 - 1)):
        assert LatentConfig.from_text(latent.to_text()) == latent


def test_a_base_whose_head_is_zero_is_refused(clients: Callable[..., Latents]) -> None:
    base = {**initial(), HEAD: torch.zeros(5, WIDTH)}
    with pytest.raises(ValueError, match="head.weight of the base is zero .*warm up first"):
        clients().run(flite(), 1, to_record(base))
    base = {**initial(), HEAD: torch.zeros(5, WIDTH)}
    clients().run(flite(warmup_rounds=1), 2, to_record(base))  # trained in the warm-up


@pytest.mark.parametrize(
    "text", ["", "sketch", "sketch/5/3", "sketch/5/3/x", "sketch/-5/3/1", "sketch/5/3/1/stored/1"]
)
def test_a_text_that_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ff.latent must be GENERATOR/DIM/RANK/SEED.*got"):
        LatentConfig.from_text(text)
    with pytest.raises(ValueError, match="rank must be in 1..dim=5, got 7"):
        LatentConfig.from_text("sketch/5/7/1")
    with pytest.raises(ValueError, match="memory must be stored or regenerated, got 'none'"):
        LatentConfig.from_text("sketch/5/3/1/none")


@pytest.mark.parametrize("frozen", ["head", "*.qkv.weight"])
def test_a_selection_that_leaves_nothing_to_map_is_refused_before_training(frozen: str) -> None:
    strategy = flite(frozen=frozen, warmup_rounds=4)
    with pytest.raises(ValueError, match="leaves no weight of a linear or convolution layer"):
        strategy.check(to_record(initial()))
    flite(frozen="query-key", warmup_rounds=4).check(to_record(initial()))
