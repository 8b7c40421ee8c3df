"""Runs whose clients send a latent, in the real app on real data."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from flwr.app import ConfigRecord

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.start import prepare
from fedfrozen_app.models.latent import LatentMapping
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import FedAvgM
from fedfrozen_app.strategies.latent import FedFrozenLatent, LatentConfig
from fedfrozen_app.training.local import local_work
from fedfrozen_app.training.worker import Worker, resident
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.ledger import LedgerGrid
from tests.engine.run import Run, equal, small_config
from tests.engine.test_rules import go_on

QUICK: dict[str, Any] = {
    "strategy": "latent",
    "generator": "sketch",
    "head": "frozen-kaiming",
    "local_steps": 2,
    "batch_size": 5,
    "max_train_examples": 101,
    "max_test_examples": 53,
}
WARM: dict[str, Any] = {"warmup_rounds": 1, "head": "trainable"}
FEDAVG: dict[str, Any] = {"strategy": "fedavg", "generator": "gaussian-qr", "head": "trainable"}
MAPPED = 17  # of vit-digits: the patches, and qkv, proj, fc1, fc2 of four blocks
LATENT_BYTES = MAPPED * 64 * 4
Runs = Callable[..., Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Runs:
    """Runs by what they differ in; the same one is made once."""
    made: dict[str, Run] = {}

    def of(**keys: Any) -> Run:
        name = repr(sorted(keys.items()))
        if name not in made:
            made[name] = Run(tmp_path_factory.mktemp("latent"), cache, **{**QUICK, **keys})
        return made[name]

    return of


def size(model: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in model.values())


def start(run: Run) -> dict[str, torch.Tensor]:
    return resident(run.config).initial_weights()


def moved(run: Run, before: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(run.model[name], before[name])]


# --- what moves -------------------------------------------------------------------------
def test_flite_moves_the_weights_of_layers_and_keeps_the_bits_of_the_rest(runs: Runs) -> None:
    run = runs()
    names = moved(run, start(run))
    assert len(names) == MAPPED
    assert names[0] == "patch_embed.proj.weight"
    assert {name.split(".", 2)[-1] for name in names[1:]} == {
        "attn.qkv.weight",
        "attn.proj.weight",
        "mlp.fc1.weight",
        "mlp.fc2.weight",
    }
    assert [line.phase for line in run.metrics] == ["start", *["latent"] * 3]
    assert [(line.clients, line.dropped) for line in run.metrics[1:]] == [(3, 0)] * 3


def test_after_a_warmup_the_rest_keeps_the_bits_it_had_at_the_freeze(runs: Runs) -> None:
    at_freeze = runs(**FEDAVG, weighting="uniform", rounds=1)
    run = runs(**WARM, frozen="query-key")
    assert [line.phase for line in run.metrics] == ["start", "warmup", "latent", "latent"]
    mapped = {tensor.entry.name for tensor in mapping_of(run).tensors}
    assert set(moved(run, at_freeze.model)) == mapped and len(mapped) == MAPPED
    for name, tensor in run.model.items():
        if name.endswith("qkv.weight"):
            rows = (tensor != at_freeze.model[name]).any(dim=1)
            assert not rows[:128].any() and rows[128:].all()  # queries and keys, values


def test_a_warmup_without_end_is_an_unweighted_fedavg(runs: Runs) -> None:
    run = runs(**{**WARM, "warmup_rounds": 3})
    plain = runs(**FEDAVG, weighting="uniform")
    assert equal(run.model, plain.model)
    lines, expected = run.comparable(), plain.comparable()
    for line in (*lines, *expected):
        del line["strategy"], line["phase"]
    assert lines == expected


def test_local_training_of_a_latent_lowers_the_loss(runs: Runs) -> None:
    run = runs(local_steps=20, latent_lr=0.1)
    losses = [line.test_loss for line in run.metrics]
    assert losses[-1] is not None and losses[0] is not None
    assert losses[-1] < 0.95 * losses[0]
    before = start(run)
    change = torch.cat([(run.model[name] - before[name]).flatten() for name in before])
    assert 0.1 < float(change.norm()) < float(size(before))


def test_a_latent_has_an_optimiser_of_its_own() -> None:
    keys = {
        "strategy": "latent",
        "optimizer": "sgd",
        "lr": 0.5,
        "weight-decay": 0.3,
        "clip-norm": 7,
    }

    def used(**own: Any) -> tuple[Any, ...]:
        config = RunConfig.from_mapping({**keys, **own})
        one = local_work(config, 1, 0, latent=True)
        return one.optimizer, one.lr, one.weight_decay, one.clip_norm

    assert used() == ("adam", 0.01, 1e-4, 1.0)
    own = {"latent-lr": 0.2, "latent-weight-decay": 0.4, "latent-clip-norm": 0.0}
    assert used(**own) == ("adam", 0.2, 0.4, 0.0)
    warm = local_work(RunConfig.from_mapping(keys), 1, 0)
    assert (warm.optimizer, warm.lr, warm.weight_decay, warm.clip_norm) == ("sgd", 0.5, 0.3, 7)


# --- the mean ---------------------------------------------------------------------------
@pytest.mark.parametrize(("weighting", "frozen"), [("uniform", "all"), ("examples", "query-key")])
def test_the_mean_of_latents_is_fedavg_on_the_mapped_weights(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, weighting: str, frozen: str
) -> None:
    sent: list[dict[str, torch.Tensor]] = []  # what plain FedAvg would have been sent
    real = Worker.active

    def active(self: Worker) -> dict[str, torch.Tensor]:
        sent.append(copy.deepcopy(dict(self.entries)))
        return real(self)

    monkeypatch.setattr(Worker, "active", active)
    run = Run(tmp_path, cache, rounds=1, weighting=weighting, frozen=frozen, **QUICK)
    sizes = [len(rows) for rows in resident(run.config).partition.clients]
    assert len(set(sizes)) == 3 and len(sent) == 3
    weights = torch.tensor(sizes if weighting == "examples" else [1, 1, 1]).double()
    for name, tensor in run.model.items():
        models = torch.stack([model[name] for model in sent]).double()
        mean = torch.tensordot(weights / weights.sum(), models, 1)
        assert (mean - tensor).abs().max() <= 1e-6
    spread = sent[0]["blocks.0.mlp.fc1.weight"] - sent[1]["blocks.0.mlp.fc1.weight"]
    assert spread.abs().max() > 1e-4


@pytest.mark.parametrize("generator", ["sketch", "gaussian-qr"])
def test_the_identity_error_stands_in_the_line_of_the_first_round_of_latents(
    runs: Runs, generator: str
) -> None:
    run = runs(**WARM, generator=generator)
    errors = [line.identity_error for line in run.metrics]
    assert errors[:2] == [None, None] and errors[3] is None
    assert errors[2] is not None and 0 < errors[2] <= 1e-7
    mapped = {tensor.entry.name for tensor in mapping_of(run).tensors}
    assert max(float(run.model[name].abs().max()) for name in mapped) < 1


# --- bytes ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bits", "each"), [(32, LATENT_BYTES), (8, MAPPED * 64 + 8), (4, MAPPED * 32 + 8)]
)
def test_the_base_goes_down_once_and_then_only_latents(runs: Runs, bits: int, each: int) -> None:
    assert LATENT_BYTES == 4352
    run = runs(latent_bits=bits) if bits < 32 else runs()
    whole = size(run.model)
    assert [line.bytes_up for line in run.metrics] == [0, 3 * each, 3 * each, 3 * each]
    assert [line.bytes_down for line in run.metrics] == [
        0,
        3 * (each + whole),
        3 * each,
        3 * each,
    ]


def test_a_warmup_sends_whole_models_and_the_base_is_the_one_after_it(runs: Runs) -> None:
    run = runs(**WARM)
    whole = 3 * size(run.model)
    assert [line.bytes_up for line in run.metrics[1:]] == [whole, *[3 * LATENT_BYTES] * 2]
    assert [line.bytes_down for line in run.metrics[1:]] == [
        whole,
        whole + 3 * LATENT_BYTES,
        3 * LATENT_BYTES,
    ]


def test_clients_whose_cache_is_gone_get_the_base_in_the_same_round(
    tmp_path: Path, runs: Runs
) -> None:
    own = tmp_path / "cache"

    def lose(metrics: Any) -> None:
        if metrics.round == 2:
            for path in (own / "frozen").iterdir():
                path.unlink()
            resident(small_config(tmp_path / "runs", str(own), **QUICK)).digest = ""

    run = Run(tmp_path / "runs", str(own), on_round=lose, **QUICK)
    # the three share a cache: the first one asks, and what it is sent serves the others
    assert [line.bytes_down for line in run.metrics[2:]] == [
        3 * LATENT_BYTES,
        4 * LATENT_BYTES + size(run.model),
    ]
    assert [line.dropped for line in run.metrics] == [0] * 4
    assert equal(run.model, runs().model)


# --- the same again ---------------------------------------------------------------------
@pytest.mark.slow
def test_clients_in_worker_processes_give_the_same_run(
    tmp_path: Path, cache: str, runs: Runs
) -> None:
    one, two = runs(latent_bits=4), Run(tmp_path, cache, jobs=2, **{**QUICK, "latent_bits": 4})
    assert equal(two.model, one.model)
    assert two.comparable() == one.comparable()


def test_the_same_seed_gives_the_same_run_and_another_another_map(
    tmp_path: Path, cache: str, runs: Runs
) -> None:
    one, same = runs(), Run(tmp_path, cache, **QUICK)
    assert equal(one.model, same.model) and one.comparable() == same.comparable()
    maps = []
    for seed in (1, 2):
        worker, strategy = prepare(small_config(tmp_path, cache, seed=seed, **QUICK))
        assert isinstance(strategy, FedFrozenLatent) and strategy.latent.seed == seed
        mapping = strategy.latent.mapping(Selection.build("all", dict(worker.entries)))
        z = torch.ones(mapping.size)
        maps.append(mapping.delta(z)["blocks.0.mlp.fc1.weight"])
    assert not torch.equal(*maps)


def test_memory_changes_no_bit_and_the_generator_does(runs: Runs) -> None:
    stored = runs(generator="gaussian-qr")
    regenerated = runs(generator="gaussian-qr", generator_memory="regenerated")
    assert equal(stored.model, regenerated.model)
    sketch = runs()
    name = "blocks.0.mlp.fc1.weight"
    assert not torch.equal(stored.model[name], sketch.model[name])
    assert [line.bytes_up for line in stored.metrics] == [line.bytes_up for line in sketch.metrics]


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_restarted_server_goes_on_as_if_nothing_had_been(
    tmp_path: Path, cache: str, runs: Runs, bits: int, stop: int
) -> None:
    # stop 1 lies in the warm-up, 2 at the freeze, 3 among latents
    keys: dict[str, Any] = {**WARM, "rounds": 4, "warmup_rounds": 2, "eval_every": 0}
    keys |= {} if bits == 32 else {"latent_bits": bits}
    whole = runs(**keys)
    config = small_config(tmp_path, cache, **{**QUICK, **keys})
    arrays = to_record(prepare(config)[0].initial_weights())
    arrays, saved, _ = go_on(config, arrays, range(1, stop + 1), None)
    held = {name: tensor.clone() for name, tensor in to_tensors(arrays).items()}
    resident.cache_clear()  # a new process knows nothing
    rest, _, strategy = go_on(config, to_record(held), range(stop + 1, 5), copy.deepcopy(saved))
    assert equal(to_tensors(rest), whole.model)
    assert isinstance(strategy, FedFrozenLatent)
    assert strategy.identity_error == whole.metrics[3].identity_error is not None


# --- heads, other models, other rules ---------------------------------------------------
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_head_that_is_never_trained_is_part_of_the_base(runs: Runs, warmup: int) -> None:
    run = runs(head="frozen-orthogonal", rounds=2, warmup_rounds=warmup)
    before = start(run)
    weight = before["head.weight"]
    assert (weight @ weight.t() - torch.eye(10)).abs().max() < 1e-5
    assert torch.equal(run.model["head.weight"], weight)
    assert torch.equal(run.model["head.bias"], before["head.bias"])
    names = moved(run, before)
    assert len(names) == (MAPPED if warmup == 0 else len(before) - 2)
    assert [line.bytes_up for line in run.metrics[-1:]] == [3 * LATENT_BYTES]
    base = size(run.model) if warmup else 0  # else it has gone out a round before
    assert run.metrics[-1].bytes_down == 3 * (LATENT_BYTES + base)
    head = weight.nbytes + before["head.bias"].nbytes
    if warmup:
        assert run.metrics[1].bytes_down == 3 * size(run.model)
        assert run.metrics[1].bytes_up == 3 * (size(run.model) - head)


def few_rows(source: Path, target: Path, count: int) -> str:
    """Cut the files of a data set that lies beside the checkout to their first rows."""
    if not source.is_dir():
        pytest.skip(f"no {source.name} beside the checkout")
    for path in source.glob("*.parquet"):
        rows = next(pq.ParquetFile(path).iter_batches(batch_size=count))
        pq.write_table(pa.Table.from_batches([rows]), target / path.name)
    return str(target)


def test_a_small_gpt_sends_a_latent(shared: Path, tmp_path: Path, cache: str) -> None:
    data = few_rows(shared / "data" / "wikitext2", tmp_path, 701)
    keys: dict[str, Any] = {
        "dataset": "wikitext2", "model": "tinygpt-mini", "data_dir": data,
        "partitioner": "iid", "context_length": 61, "rounds": 1, "local_steps": 3,
        "batch_size": 7, "latent_lr": 0.1,
    }  # fmt: skip
    run = Run(tmp_path, cache, **{**QUICK, **keys})
    before = start(run)
    mapping = mapping_of(run)
    names = moved(run, before)
    assert len(names) == len(mapping.tensors) > 0
    assert set(names) == {tensor.entry.name for tensor in mapping.tensors}
    assert not any(part in name for name in names for part in ("emb", "norm", "head", "bias"))
    assert run.metrics[1].bytes_up == 3 * 4 * mapping.size
    perplexities = [line.test_perplexity for line in run.metrics]
    assert perplexities[0] is not None and perplexities[1] is not None
    assert perplexities[1] < perplexities[0]
    assert run.metrics[1].identity_error is not None and run.metrics[1].identity_error <= 1e-7


def mapping_of(run: Run) -> LatentMapping:
    return LatentConfig(generator="sketch").mapping(Selection.build("all", run.model))


@pytest.fixture(scope="module")
def few_of_cifar100(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_rows(shared / "data" / "cifar100", tmp_path_factory.mktemp("cifar100"), 41)


@pytest.mark.parametrize(("bits", "each"), [(32, 5120), (8, 1288), (4, 648)])
def test_a_resnet18_for_100_classes_sends_kilobytes(
    tmp_path: Path, cache: str, few_of_cifar100: str, bits: int, each: int
) -> None:
    keys: dict[str, Any] = {
        "dataset": "cifar100", "model": "resnet18-gn", "data_dir": few_of_cifar100,
        "partitioner": "iid", "num_clients": 2, "rounds": 1, "local_steps": 1,
        "batch_size": 3, "max_train_examples": 0, "max_test_examples": 5, "eval_every": 0,
        "head": "frozen-orthogonal", "latent_bits": bits,
    }  # fmt: skip
    rounds = 2 if bits == 4 else 1
    run = Run(tmp_path, cache, **{**QUICK, **keys, "rounds": rounds})
    assert len(mapping_of(run).tensors) == 20
    assert mapping_of(run).num_weights == 11_159_232
    assert mapping_of(run).size == 1280
    assert run.metrics[1].bytes_up == 2 * each
    assert run.metrics[1].bytes_down == 2 * (each + size(run.model))
    assert run.metrics[1].identity_error is not None and run.metrics[1].identity_error <= 1e-7
    if bits == 4:
        last = run.metrics[-1]
        assert (last.bytes_up, last.bytes_down) == (2 * 648, 2 * 648)
        # the rest is Flower's tree of records: a NumPy header, and 64 digits twice an object
        assert last.wire_bytes_up <= 2 * 1520 and last.wire_bytes_down < 2 * 1600


def test_server_momentum_over_latents_runs_with_the_clients_of_the_app(
    tmp_path: Path, cache: str
) -> None:
    config = small_config(tmp_path, cache, **{**QUICK, **WARM})
    initial = resident(config).initial_weights()
    models = []
    for momentum in (0.0, 0.9):
        rule = FedAvgM(server_momentum=momentum, fraction_evaluate=0.0)
        strategy = FedFrozenLatent(rule, warmup_rounds=1, latent=LatentConfig(generator="sketch"))
        grid = LedgerGrid(LocalGrid("fedfrozen_app.client_app:app", 3, config.to_mapping()))
        arrays = to_record({name: tensor.clone() for name, tensor in initial.items()})
        result = strategy.start(grid, arrays, num_rounds=4)
        assert strategy.report.dropped == 0
        assert list(rule.state.v) == ["z"]
        assert grid.take().bytes_up == 3 * (size(initial) + 3 * LATENT_BYTES)
        models.append(to_tensors(result.arrays))
    assert not torch.equal(*(model["blocks.0.mlp.fc1.weight"] for model in models))
    assert torch.equal(*(model["blocks.0.mlp.fc1.bias"] for model in models))


# --- refusals ---------------------------------------------------------------------------
@pytest.mark.parametrize("frozen", ["*weight", "patch_embed.*, blocks.*"])
def test_nothing_to_map_is_refused_before_the_run_folder_is_made(
    tmp_path: Path, cache: str, frozen: str
) -> None:
    config = small_config(tmp_path / "runs", cache, frozen=frozen, **QUICK)
    with pytest.raises(ConfigError, match="leaves no weight of a linear or convolution layer"):
        prepare(config)
    assert not (tmp_path / "runs").exists()


def test_a_head_of_zeros_is_refused_before_the_run_folder_is_made(
    tmp_path: Path, cache: str
) -> None:
    # timm's heads start at zero, which is no place to begin where they are not trained
    with pytest.raises(ConfigError, match="head.weight of the base is zero .*frozen-orthogonal"):
        Run(tmp_path / "runs", cache, **{**QUICK, "head": "trainable"})
    assert not (tmp_path / "runs").exists()


def test_a_message_with_a_latent_of_another_map_is_an_error_reply(
    tmp_path: Path, cache: str
) -> None:
    config = small_config(tmp_path, cache, **QUICK)
    worker, strategy = prepare(config)
    assert isinstance(strategy, FedFrozenLatent)
    grid = LocalGrid("fedfrozen_app.client_app:app", 3, config.to_mapping())

    messages = list(
        strategy.configure_train(1, to_record(worker.initial_weights()), ConfigRecord(), grid)
    )
    messages[0].content["arrays"] = to_record({"z": torch.zeros(13)})
    (reply,) = grid.send_and_receive(messages[:1])
    assert reply.has_error() and "latent must be floating point [1088]" in reply.error.reason
