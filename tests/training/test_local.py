"""Claims about the one local loop; the reference is a plain torch loop written here."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.models.freeze import freeze_
from fedfrozen_app.models.latent import LatentMapping, LatentTraining
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.seeds import derive_seed, torch_generator
from fedfrozen_app.training.hooks import Hook
from fedfrozen_app.training.local import (
    LocalTraining,
    evaluate,
    make_optimizer,
    resolve_device,
    train,
)

WHERE = {"seed": 3, "server_round": 5, "partition_id": 7}


class TensorExamples:
    """Tensors in memory; remembers the positions and generators it was asked for."""

    def __init__(self, x, y, noise=0.0):
        self.x, self.y, self.noise = x, y, noise
        self.asked, self.generators = [], []

    def __len__(self):
        return len(self.y)

    def batch(self, positions, generator):
        self.asked.append(positions.clone())
        self.generators.append(generator)
        x = self.x[positions]
        if generator is not None and self.noise:
            x = x + self.noise * torch.randn(x.shape, generator=generator)
        return x, self.y[positions]


def images(count=23, noise=0.0):
    generator = torch_generator(1, "test-images")
    x = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorExamples(x, torch.randint(5, (count,), generator=generator), noise)


def vectors(count, width=3):
    generator = torch_generator(1, "test-vectors")
    x = torch.randn(count, width, generator=generator)
    return TensorExamples(x, torch.randint(2, (count,), generator=generator))


def vit(**keys):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        shape = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3}
        return VisionTransformer(
            **shape, num_classes=5, class_token=False, global_pool="avg", **keys
        )


def linear():
    """A classifier of 2 numbers into 2 classes whose weights are zero."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


def batchnorm_model():
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def weights(model):
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def trained(settings, examples=None, model=None, hooks=(), **where):
    """Return the weights after training a new ViT (or ``model``)."""
    model = model or vit()
    train(model, examples or images(), settings, hooks=hooks, **(WHERE | where))
    return weights(model)


def plain_loop(model, optimizer, examples, epochs, batch_size, clip_norm=0.0):
    """Train as a textbook would, with the documented order of batches."""
    generator = torch_generator(3, "batches", 5, 7)
    model.train()
    for _ in range(epochs):
        for positions in torch.randperm(len(examples), generator=generator).split(batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(examples.x[positions]), examples.y[positions])
            loss.backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return weights(model)


# --- steps by hand and against the textbook --------------------------------------------------
ONE = TensorExamples(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))


def test_one_sgd_step_by_hand():
    # p = (1/2, 1/2), gradient rows (p - onehot) x = (-1/2, -1), (1/2, 1); step -0.1 of it.
    model = linear()
    result = train(model, ONE, LocalTraining(epochs=1, lr=0.1), **WHERE)
    torch.testing.assert_close(model.weight.data, torch.tensor([[0.05, 0.1], [-0.05, -0.1]]))
    assert result.train_loss == pytest.approx(math.log(2), abs=1e-7)
    assert (result.num_examples, result.steps) == (1, 1)
    assert result.seconds > 0


def test_clipping_by_hand():
    # The gradient above has norm sqrt(5/2); clipped to 1 its first entry is -0.5 / sqrt(5/2).
    model = linear()
    train(model, ONE, LocalTraining(epochs=1, lr=0.1, clip_norm=1.0), **WHERE)
    assert model.weight[0, 0].item() == pytest.approx(0.05 / math.sqrt(2.5), rel=1e-5)
    assert model.weight.norm().item() == pytest.approx(0.1, rel=1e-5)


def test_a_gradient_inside_the_bound_is_not_clipped():
    assert same(
        trained(LocalTraining(epochs=1, clip_norm=1e6), images()),
        trained(LocalTraining(epochs=1), images()),
    )


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (LocalTraining(lr=0.05, momentum=0.0), lambda p: torch.optim.SGD(p, 0.05)),
        (
            LocalTraining(lr=0.05, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, fused=True),
        ),
        (
            LocalTraining(optimizer="adamw", lr=0.01, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, fused=True),
        ),
        (
            LocalTraining(lr=0.05, clip_norm=0.5),
            lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
        ),
    ],
    ids=["sgd", "momentum-and-decay", "adamw", "clipped"],
)
def test_training_equals_a_plain_loop_bit_for_bit(settings, optimizer):
    settings = LocalTraining(**(vars(settings) | {"epochs": 3, "batch_size": 7}))
    reference = vit()
    expected = plain_loop(
        reference, optimizer(reference.parameters()), images(), 3, 7, settings.clip_norm
    )
    assert same(trained(settings), expected)
    assert not same(expected, weights(vit()))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_one_pass_over_all_is_the_optimiser_parameter_by_parameter_to_rounding(optimizer):
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    reference, start = vit(), weights(vit())
    own = {"momentum": 0.9} if optimizer == "sgd" else {}
    plain = kinds[optimizer](reference.parameters(), 0.01, weight_decay=0.1, foreach=False, **own)
    expected = plain_loop(reference, plain, images(), 3, 7, 0.0)
    found = trained(
        LocalTraining(optimizer=optimizer, lr=0.01, weight_decay=0.1, epochs=3, batch_size=7)
    )
    for name, tensor in expected.items():
        moved = (tensor - start[name]).norm()
        assert (found[name] - tensor).norm() <= 1e-3 * moved, name


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_parameter_of_columns_moves_alone(optimizer):
    whole = torch.randn(8, 12, generator=torch_generator(1, "columns"))
    beside = whole.clone()
    param = nn.Parameter(whole[:, 3:8])
    settings = LocalTraining(optimizer=optimizer, lr=0.1)
    step = make_optimizer([param], settings)
    param.grad = torch.ones(8, 5)
    step.step()
    assert torch.equal(whole[:, :3], beside[:, :3]) and torch.equal(whole[:, 8:], beside[:, 8:])
    # one step of Adam is lr long, whatever the gradient's size, and so is SGD's along ones
    assert torch.allclose(whole[:, 3:8], beside[:, 3:8] - 0.1, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (
            LocalTraining(optimizer="adam", lr=0.05, weight_decay=0.3),
            lambda z: torch.optim.Adam(z, 0.05, weight_decay=0.3),
        ),
        (
            LocalTraining(lr=0.05, weight_decay=0.1, clip_norm=0.01),
            lambda z: torch.optim.SGD(z, 0.05, momentum=0.9, weight_decay=0.1),
        ),
    ],
    ids=["adam-and-decay", "clipped"],
)
def test_training_a_latent_equals_a_plain_loop_through_the_formula(settings, optimizer):
    settings = LocalTraining(**(vars(settings) | {"epochs": 3, "batch_size": 7}))
    model, examples = vit().double(), images()
    with torch.random.fork_rng():
        torch.manual_seed(13)
        model.head.weight.data.normal_()  # timm's zeros would let no gradient through
    examples.x = examples.x.double()
    base = weights(model)
    mapping = LatentMapping(Selection.build("all", base), dim=7, rank=5, seed=3)
    start = torch.randn(mapping.size, generator=torch_generator(1, "test-z"), dtype=torch.float64)

    z = start.clone().requires_grad_()
    plain, steps = optimizer([z]), 0
    factors = [(t, t.columns.dense(torch.float64), t.basis_t.double()) for t in mapping.tensors]
    generator = torch_generator(3, "batches", 5, 7)
    for _ in range(3):
        for positions in torch.randperm(len(examples), generator=generator).split(7):
            theta = dict(base)
            for tensor, u, v_t in factors:
                delta = u @ (v_t @ z[tensor.latent])
                theta[tensor.key] = base[tensor.key] + delta.view(tensor.columns.shape)
            logits = torch.func.functional_call(model, theta, examples.x[positions]).float()
            (z.grad,) = torch.autograd.grad(F.cross_entropy(logits, examples.y[positions]), z)
            if settings.clip_norm:
                assert z.grad.norm() > settings.clip_norm
                nn.utils.clip_grad_norm_([z], settings.clip_norm)
            plain.step()
            steps += 1

    freeze_(model, mapping.selection)
    latent = LatentTraining(mapping, model, start)
    result = train(model, examples, settings, latent=latent, **WHERE)
    assert result.steps == steps == 12
    torch.testing.assert_close(latent.latent.detach(), z.detach(), rtol=0, atol=1e-8)
    assert (latent.latent - start).abs().max() > 1e-3
    expected = {name: tensor.clone() for name, tensor in base.items()}
    mapping.apply_(expected, base, latent.latent)
    assert same(weights(model), expected)


def test_every_call_starts_with_a_fresh_optimizer():
    model, reference = vit(), vit()
    for _ in range(2):
        train(model, images(), LocalTraining(epochs=1, batch_size=7), **WHERE)
        optimizer = torch.optim.SGD(reference.parameters(), 0.01, momentum=0.9, fused=True)
        plain_loop(reference, optimizer, images(), 1, 7)
    assert same(weights(model), weights(reference))


def test_gradients_do_not_outlive_training():
    model = vit()
    train(model, images(), LocalTraining(epochs=1), **WHERE)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- batches, epochs and steps ---------------------------------------------------------------
def test_every_epoch_sees_every_example_once_in_a_new_order():
    examples = images()
    result = train(vit(), examples, LocalTraining(epochs=2, batch_size=7), **WHERE)
    assert [len(positions) for positions in examples.asked] == [7, 7, 7, 2] * 2
    first, second = torch.cat(examples.asked[:4]), torch.cat(examples.asked[4:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(23))
    assert not torch.equal(first, second)
    assert (result.num_examples, result.steps) == (23, 8)


def test_steps_count_optimizer_steps_over_reshuffled_passes():
    by_steps, by_epochs = images(), images()
    result = train(vit(), by_steps, LocalTraining(steps=6, batch_size=7), **WHERE)
    train(vit(), by_epochs, LocalTraining(epochs=2, batch_size=7), **WHERE)
    assert (result.num_examples, result.steps) == (23, 6)
    assert len(by_steps.asked) == 6
    for left, right in zip(by_steps.asked, by_epochs.asked[:6], strict=True):
        assert torch.equal(left, right)


def test_as_many_steps_as_the_epochs_have_is_the_same_training():
    epochs = trained(LocalTraining(epochs=2, batch_size=7))
    assert same(trained(LocalTraining(steps=8, batch_size=7)), epochs)


def test_the_reported_loss_is_the_mean_over_examples_not_over_batches():
    # With lr 0 every batch meets the same model, so the mean is that of the whole set.
    model, examples = vit(), images()
    result = train(model, examples, LocalTraining(epochs=1, batch_size=7, lr=0.0), **WHERE)
    loss, _ = evaluate(model, examples, batch_size=23)
    batches = [
        F.cross_entropy(model(examples.x[p]), examples.y[p]).item() for p in examples.asked[:4]
    ]
    assert result.train_loss == pytest.approx(loss, rel=1e-6)
    assert abs(sum(batches) / 4 - loss) > 1e-4


def test_a_client_smaller_than_a_batch_takes_one_step_an_epoch():
    examples = images(5)
    result = train(vit(), examples, LocalTraining(epochs=3, batch_size=32), **WHERE)
    assert (result.num_examples, result.steps) == (5, 3)
    assert [sorted(p.tolist()) for p in examples.asked] == [list(range(5))] * 3


def test_a_leftover_example_joins_the_batch_before_it_under_batchnorm():
    model, examples = batchnorm_model(), vectors(8)
    result = train(model, examples, LocalTraining(epochs=1, batch_size=7), **WHERE)
    assert [len(positions) for positions in examples.asked] == [8]
    assert (result.num_examples, result.steps) == (8, 1)
    assert model[1].num_batches_tracked.item() == 1


def test_a_leftover_example_is_a_batch_of_its_own_without_batchnorm():
    examples = images(8)
    result = train(vit(), examples, LocalTraining(epochs=1, batch_size=7), **WHERE)
    assert [len(positions) for positions in examples.asked] == [7, 1]
    assert result.steps == 2


def test_a_frozen_batchnorm_keeps_its_statistics_and_needs_no_merging():
    model, examples = batchnorm_model(), vectors(8)
    freeze_(model, Selection.build("1.*", model.state_dict()))
    before = weights(model)
    train(model, examples, LocalTraining(epochs=1, batch_size=7), **WHERE)
    assert [len(positions) for positions in examples.asked] == [7, 1]
    after = weights(model)
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert moved == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_leftovers_of_more_than_one_example_are_not_merged():
    examples = vectors(9)
    train(batchnorm_model(), examples, LocalTraining(epochs=1, batch_size=7), **WHERE)
    assert [len(positions) for positions in examples.asked] == [7, 2]


def test_an_empty_client_changes_nothing():
    class Refusing(Hook):
        def begin(self, params):
            raise AssertionError("called without data")

    model = batchnorm_model().eval()
    before = weights(model)
    result = train(model, vectors(0), LocalTraining(), hooks=[Refusing()], **WHERE)
    assert (result.num_examples, result.steps, result.train_loss) == (0, 0, 0.0)
    assert same(weights(model), before)
    assert not model.training


# --- random numbers --------------------------------------------------------------------------
NOISY = LocalTraining(epochs=2, batch_size=7)


def test_equal_arguments_give_bit_equal_weights():
    runs = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        model = vit(drop_path_rate=0.3, proj_drop_rate=0.2)
        runs.append(trained(NOISY, images(noise=0.1), model))
    assert same(*runs)


@pytest.mark.parametrize("index", ["seed", "server_round", "partition_id"])
@pytest.mark.parametrize("source", ["order", "augmentation", "layers"])
def test_seed_round_and_partition_each_change_every_stream(index, source):
    def run(**where):
        # With one example there is one order, so only the other streams can differ.
        examples = images(23 if source == "order" else 1, noise=source == "augmentation")
        model = vit(proj_drop_rate=0.2 if source == "layers" else 0.0)
        after = trained(LocalTraining(epochs=1, batch_size=7), examples, model, **where)
        return torch.cat([value.flatten() for value in after.values()])

    assert torch.equal(run(), run())
    assert (run() - run(**{index: WHERE[index] + 1})).abs().max() > 1e-5


def test_augmentation_does_not_change_the_order_of_batches():
    plain, noisy = images(), images(noise=0.1)
    trained(NOISY, plain)
    trained(NOISY, noisy)
    for left, right in zip(plain.asked, noisy.asked, strict=True):
        assert torch.equal(left, right)
    assert all(generator is noisy.generators[0] for generator in noisy.generators)
    assert noisy.generators[0].initial_seed() == derive_seed(3, "augmentation", 5, 7)


def test_global_generators_are_left_alone():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    trained(NOISY, images(noise=0.1), vit(proj_drop_rate=0.2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


# --- precision -------------------------------------------------------------------------------
def test_bf16_training_is_close_to_fp32_and_keeps_fp32_weights():
    start = weights(vit())
    fp32 = trained(LocalTraining(epochs=2, batch_size=7))
    bf16 = trained(LocalTraining(epochs=2, batch_size=7, precision="bf16"))
    moved = sum((fp32[key] - start[key]).square().sum() for key in start).sqrt()
    apart = sum((fp32[key] - bf16[key]).square().sum() for key in start).sqrt()
    assert 0 < apart < 0.05 * moved
    assert {value.dtype for value in bf16.values()} == {torch.float32}


def test_bf16_evaluation_is_close_to_fp32():
    model, examples = vit(), images()
    fp32, _ = evaluate(model, examples, batch_size=23)
    bf16, _ = evaluate(model, examples, batch_size=23, precision="bf16")
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.01)


# --- hooks -----------------------------------------------------------------------------------
class Recorder(Hook):
    def __init__(self):
        self.calls = []

    def begin(self, params):
        self.calls.append("begin")
        self.names, self.start = list(params), {k: v.detach().clone() for k, v in params.items()}

    def extra_loss(self, params):
        self.calls.append("extra_loss")
        assert all(parameter.grad is None for parameter in params.values())
        return None

    def correct(self, params):
        self.calls.append("correct")
        assert all(parameter.grad is not None for parameter in params.values())


def test_hooks_are_called_in_order_with_parameters_by_state_dict_name():
    recorder, model = Recorder(), vit()
    before = weights(model)
    hooks = [Recorder(), recorder]
    after = trained(LocalTraining(steps=2, batch_size=7), model=model, hooks=hooks)
    assert recorder.calls == ["begin", *["extra_loss", "correct"] * 2]
    assert recorder.names == list(before)
    assert same(recorder.start, before)
    assert same(after, trained(LocalTraining(steps=2, batch_size=7)))


class Proximal(Hook):
    """(mu/2) ||w - w_t||^2, as a term or as a correction."""

    def __init__(self, mu, as_term):
        self.mu, self.as_term = mu, as_term

    def begin(self, params):
        self.start = {name: value.detach().clone() for name, value in params.items()}

    def extra_loss(self, params):
        if not self.as_term:
            return None
        return self.mu / 2 * sum((params[k] - self.start[k]).square().sum() for k in params)

    def correct(self, params):
        if not self.as_term:
            for name, parameter in params.items():
                parameter.grad.add_(parameter.detach() - self.start[name], alpha=self.mu)


def test_a_term_and_the_correction_by_its_gradient_train_alike():
    settings = LocalTraining(epochs=2, batch_size=7, lr=0.05)
    term = trained(settings, hooks=[Proximal(5.0, as_term=True)])
    correction = trained(settings, hooks=[Proximal(5.0, as_term=False)])
    free = trained(settings)
    for key in free:
        torch.testing.assert_close(term[key], correction[key], rtol=1e-4, atol=1e-6)
    assert (term["head.weight"] - free["head.weight"]).abs().max() > 1e-3


def test_the_reported_loss_leaves_out_the_hooks_terms():
    class Constant(Hook):
        def extra_loss(self, params):
            return torch.tensor(100.0)

    with_term = train(linear(), ONE, LocalTraining(epochs=1), hooks=[Constant()], **WHERE)
    assert with_term.train_loss == pytest.approx(math.log(2), abs=1e-7)


def test_all_hooks_add_up_before_clipping():
    class Push(Hook):
        def correct(self, params):
            params["weight"].grad.add_(torch.tensor([[3.0, 0.0], [0.0, 0.0]]))

    model = linear()
    settings = LocalTraining(epochs=1, lr=0.1, clip_norm=0.5)
    train(model, ONE, settings, hooks=[Push(), Push()], **WHERE)
    # Gradient (-0.5 + 6, -1; 0.5, 1), scaled to norm 0.5.
    gradient = torch.tensor([[5.5, -1.0], [0.5, 1.0]])
    torch.testing.assert_close(model.weight.data, -0.1 * 0.5 * gradient / gradient.norm())


# --- evaluation ------------------------------------------------------------------------------
def test_evaluation_by_hand():
    model = nn.Linear(1, 2, bias=False)
    nn.init.constant_(model.weight, 0.0)
    with torch.no_grad():
        model.weight[1] = 1.0  # logits (0, x): class 1 where x > 0
    x, y = torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([1, 0, 0])
    loss, accuracy = evaluate(model, TensorExamples(x, y), batch_size=2)
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1)) + math.log1p(math.exp(3))) / 3
    assert loss == pytest.approx(expected, rel=1e-6)
    assert accuracy == pytest.approx(2 / 3)


def test_evaluation_uses_neither_augmentation_nor_dropout_and_repeats_bit_for_bit():
    model, examples = vit(proj_drop_rate=0.5).train(), images(noise=9.0)
    first = evaluate(model, examples, batch_size=7)
    assert evaluate(model, examples, batch_size=7) == first
    assert set(examples.generators) == {None}
    assert first == evaluate(vit(), images(), batch_size=7)


def test_the_batch_size_of_evaluation_does_not_matter():
    loss, accuracy = evaluate(vit(), images(), batch_size=23)
    by_batches = evaluate(vit(), images(), batch_size=7)
    assert by_batches == (pytest.approx(loss, rel=1e-6), accuracy)


def test_evaluation_needs_examples():
    with pytest.raises(ValueError, match="at least one example, got 0"):
        evaluate(vit(), images(0), batch_size=7)


# --- settings --------------------------------------------------------------------------------
def test_settings_are_the_run_configs_keys():
    keys = {
        "local-epochs": 3,
        "batch-size": 7,
        "lr": 0.11,
        "momentum": 0.13,
        "weight-decay": 0.17,
        "clip-norm": 0.19,
        "precision": "bf16",
    }
    settings = vars(LocalTraining.from_config(RunConfig.from_mapping(keys)))
    other = LocalTraining.from_config(RunConfig(local_steps=5, optimizer="adamw"))
    assert (other.steps, other.optimizer) == (5, "adamw")
    assert settings == {
        "steps": 0,
        "optimizer": "sgd",
        **{key.removeprefix("local-").replace("-", "_"): value for key, value in keys.items()},
    }
    assert LocalTraining.from_config(RunConfig()) == LocalTraining()


def test_devices_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"one of the 0 visible CUDA devices, got 'cuda'"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"one of the 2 visible CUDA devices, got 'cuda:2'"):
        resolve_device("cuda:2")
