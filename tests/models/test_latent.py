"""FLITE's mapping: which weights, the averaging identity, exact zero, and the latent's gradient."""

import copy
import os
import re
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfrozen_app.models.freeze import freeze_, trainable_parameters
from fedfrozen_app.models.generators import SketchColumns
from fedfrozen_app.models.latent import LatentMapping, LatentTraining, identity_error
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.seeds import torch_generator

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

GENERATORS = ("gaussian-qr", "sketch")


def resnet18() -> nn.Module:
    """ResNet-18 of the paper for 100 classes: GroupNorm(32), 3x3 stem, no pooling after it."""
    model = timm.create_model(
        "resnet18", num_classes=100, norm_layer=partial(timm.layers.GroupNorm, num_groups=32)
    )
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def vit_s_14() -> nn.Module:
    return timm.create_model("vit_small_patch14_dinov2", img_size=56, num_classes=100)


def tiny_vit() -> nn.Module:
    """A Vision Transformer with drawn values, of odd sizes where heads allow it."""
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=10, patch_size=5, embed_dim=22, depth=2, num_heads=2, num_classes=7, mlp_ratio=1.5
    )
    generator = torch_generator(3, "weights")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(d_model=22, nhead=2, dim_feedforward=29)


def hugging_face(name: str, **sizes) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name.split('For')[0].removesuffix('LMHeadModel')}Config")
    return getattr(transformers, name)(config(**sizes))


BERT = {"hidden_size": 22, "num_attention_heads": 2, "intermediate_size": 29, "vocab_size": 31}
GPT2 = {"n_embd": 22, "n_head": 2, "n_layer": 2, "vocab_size": 31, "n_positions": 13}
LLAMA = BERT | {"num_hidden_layers": 2, "num_key_value_heads": 2, "hidden_size": 44}
T5 = {"d_model": 22, "d_kv": 11, "num_heads": 2, "d_ff": 29, "num_layers": 2, "vocab_size": 31}
FAMILIES = {
    "resnet": (resnet18, "fc"),
    "vit": (tiny_vit, "head"),
    "swin": (partial(timm.create_model, "swin_tiny_patch4_window7_224"), "head"),
    "convnext": (partial(timm.create_model, "convnext_atto"), "head"),
    "torch": (encoder_layer, "none"),
    "gpt2": (partial(hugging_face, "GPT2LMHeadModel", **GPT2), "lm_head"),
    "bert": (
        partial(hugging_face, "BertForMaskedLM", num_hidden_layers=2, **BERT),
        "cls",
    ),
    "llama": (partial(hugging_face, "LlamaForCausalLM", **LLAMA), "lm_head"),
    "t5": (partial(hugging_face, "T5ForConditionalGeneration", **T5), "lm_head"),
}


def mapping_of(model: nn.Module, frozen: str = "all", **kwargs) -> LatentMapping:
    selection = Selection.build(frozen, model.state_dict())
    return LatentMapping(selection, **{"seed": 3, "dim": 13, "rank": 7} | kwargs)


def latents(mapping: LatentMapping, count: int, std: float, dtype=torch.float32) -> list[Tensor]:
    generator = torch_generator(5, "latents")
    return [torch.randn(mapping.size, generator=generator, dtype=dtype) * std for _ in range(count)]


def clone(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def batch(count: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch_generator(5, "images")
    x = torch.randn(count, 3, 10, 10, generator=generator)
    return x, torch.randint(7, (count,), generator=generator)


# --- which weights ----------------------------------------------------------------------
def test_resnet18_has_the_counts_of_the_paper():
    with torch.device("meta"):
        model = resnet18()
    mapping = mapping_of(model, dim=64, rank=32, generator="sketch")
    assert len(mapping.tensors) == 20
    assert mapping.num_weights == 11_159_232
    assert mapping.size == 1280
    assert round(mapping.num_weights / mapping.size) == 8718
    assert "11,159,232 weights in 20 tensors by 1,280 latents (8,718x fewer)" in mapping.describe()


def test_vit_s_14_maps_its_patches_and_four_weights_per_block():
    with torch.device("meta"):
        model = vit_s_14()
    mapping = mapping_of(model, dim=64, rank=32, generator="sketch")
    assert [t.key for t in mapping.tensors[:5]] == [
        "patch_embed.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
    ]
    assert len(mapping.tensors) == 49
    assert mapping.num_weights == 384 * 3 * 14 * 14 + 12 * 12 * 384 * 384


def layer_weights(model: nn.Module, head: str) -> list[str]:
    """Return what FLITE maps, told by the classes of the modules."""
    found = []
    for prefix, module in model.named_modules():
        layers = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
        if isinstance(module, layers) or type(module).__name__ == "Conv1D":
            found += [
                f"{prefix}.{name}".removeprefix(".")
                for name, p in module.named_parameters(recurse=False)
                if p.ndim >= 2
            ]
    return [name for name in found if name.split(".")[0] != head]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_tell_the_same_layers_as_classes(family):
    build, head = FAMILIES[family]
    with torch.device("meta"):
        model = build()
    mapping = mapping_of(model, generator="sketch")
    names = [tensor.key for tensor in mapping.tensors]
    assert sorted(names) == sorted(layer_weights(model, head)) and len(names) >= 4
    order = list(model.state_dict())
    assert names == sorted(names, key=order.index)


def test_names_of_norms_and_tables_are_told_from_layers():
    layers = {"patch_embed": nn.Conv2d(3, 5, 2), "tok_emb": nn.Embedding(7, 5)}
    model = nn.ModuleDict({**layers, "norm1": nn.LayerNorm((3, 5)), "mixer": nn.Linear(5, 5)})
    names = [tensor.key for tensor in mapping_of(model).tensors]
    assert names == ["patch_embed.weight", "mixer.weight"]


def test_a_head_of_another_name_is_left_out_when_told():
    model = nn.ModuleDict({"body": nn.Linear(5, 7), "decoder": nn.Linear(7, 3)})
    assert [t.key for t in mapping_of(model).tensors] == ["body.weight", "decoder.weight"]
    assert [t.key for t in mapping_of(model, head="decoder").tensors] == ["body.weight"]
    assert [t.key for t in mapping_of(model, head="deco").tensors][-1] == "decoder.weight"


def test_a_frozen_kernel_leaves_the_value_rows_mapped():
    mapping = mapping_of(tiny_vit(), "query-key")
    shapes = {tensor.key: tensor.columns.shape for tensor in mapping.tensors}
    assert shapes["blocks.0.attn.qkv.weight"] == (22, 22)
    assert shapes["blocks.0.mlp.fc1.weight"] == (33, 22)
    assert mapping.num_weights == mapping_of(tiny_vit()).num_weights - 2 * 2 * 22 * 22


def test_frozen_blocks_are_not_mapped():
    names = {tensor.key for tensor in mapping_of(tiny_vit(), "blocks.0.*").tensors}
    assert "blocks.1.mlp.fc1.weight" in names
    assert not any(name.startswith("blocks.0.") for name in names)


@pytest.mark.parametrize("frozen", ["all", "query-key", "value-head", "*qkv.weight[key]"])
def test_the_mapping_selects_what_it_maps_and_its_spec_says_it_again(frozen):
    model = tiny_vit()
    mapping = mapping_of(model, frozen)
    selection = mapping.selection
    assert Selection.build(selection.spec, model.state_dict()) == selection
    freeze_(model, selection)
    shapes = {key: tuple(p.shape) for key, p in trainable_parameters(model).items()}
    assert shapes == {tensor.key: tensor.columns.shape for tensor in mapping.tensors}
    assert selection.num_active == mapping.num_weights


def test_a_model_of_mapped_weights_only_is_frozen_nowhere():
    model = nn.Sequential(nn.Linear(5, 7, bias=False))
    assert mapping_of(model).selection.is_all


def test_two_active_ranges_of_one_weight_are_two_tensors():
    mapping = mapping_of(tiny_vit(), "*, !blocks.0.attn.qkv.weight[query,value]")
    assert [(t.key, t.start, t.stop) for t in mapping.tensors] == [
        ("blocks.0.attn.qkv.weight#0", 0, 22),
        ("blocks.0.attn.qkv.weight#1", 44, 66),
    ]
    model = tiny_vit()
    base, arrays = clone(model), clone(model)
    mapping.apply_(arrays, base, latents(mapping, 1, 1.0)[0])
    moved = (arrays["blocks.0.attn.qkv.weight"] != base["blocks.0.attn.qkv.weight"]).all(dim=1)
    assert moved.tolist() == [True] * 22 + [False] * 22 + [True] * 22


# --- the map ----------------------------------------------------------------------------
@pytest.mark.parametrize("generator", GENERATORS)
def test_no_latent_is_the_base_bit_for_bit(generator):
    model = tiny_vit()
    base = clone(model)
    base["blocks.0.mlp.fc1.weight"][0] = -0.0
    mapping = mapping_of(model, generator=generator)
    arrays = {name: torch.full_like(tensor, 5.0) for name, tensor in base.items()}
    mapping.apply_(arrays, base, mapping.flat_zero())
    for tensor in mapping.tensors:
        assert bits(arrays[tensor.key]) == bits(base[tensor.key])
    assert (arrays["norm.weight"] == 5).all()


@pytest.mark.parametrize("generator", GENERATORS)
def test_weights_are_base_plus_u_vt_z(generator):
    model = tiny_vit()
    base, arrays = clone(model), clone(model)
    mapping = mapping_of(model, generator=generator)
    z = latents(mapping, 1, 1.0)[0]
    mapping.apply_(arrays, base, z)
    deltas = mapping.delta(z)
    for i, tensor in enumerate(mapping.tensors):
        v = tensor.basis_t.t()
        assert v.shape == (13, 7)
        expected = (tensor.columns.dense() @ (v.t() @ z[13 * i : 13 * (i + 1)])).view(
            tensor.columns.shape
        )
        torch.testing.assert_close(deltas[tensor.key], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(arrays[tensor.key], base[tensor.key] + deltas[tensor.key])
        assert expected.abs().max() > 0.01
    untouched = set(base) - {tensor.key for tensor in mapping.tensors}
    assert all(torch.equal(arrays[name], base[name]) for name in untouched)


@pytest.mark.parametrize("generator", GENERATORS)
def test_frozen_columns_of_gpt2_do_not_move(generator):
    model = FAMILIES["gpt2"][0]()
    base, arrays = clone(model), clone(model)
    mapping = mapping_of(model, "query-key", generator=generator)
    mapping.apply_(arrays, base, latents(mapping, 1, 1.0)[0])
    name = "transformer.h.0.attn.c_attn.weight"
    assert base[name].shape == (22, 66)
    assert torch.equal(arrays[name][:, :44], base[name][:, :44])
    assert (arrays[name][:, 44:] != base[name][:, 44:]).all()


@pytest.mark.parametrize("generator", GENERATORS)
def test_layers_of_one_shape_have_factors_of_their_own(generator):
    mapping = mapping_of(tiny_vit(), generator=generator)
    named = {tensor.key: tensor for tensor in mapping.tensors}
    first, second = named["blocks.0.mlp.fc1.weight"], named["blocks.1.mlp.fc1.weight"]
    for a, b in ((first.columns.dense(), second.columns.dense()), (first.basis_t, second.basis_t)):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).abs() < 0.4
        assert a.shape == b.shape


def test_active_arrays_do_as_well_as_whole_ones():
    model = tiny_vit()
    base = clone(model)
    mapping = mapping_of(model, "query-key")
    z = latents(mapping, 1, 1.0)[0]
    whole = clone(model)
    mapping.apply_(whole, base, z)
    active = {key: part.clone() for key, part in mapping.selection.restrict(base).items()}
    mapping.apply_(active, mapping.selection.restrict(base), z)
    for key, part in mapping.selection.restrict(whole).items():
        assert torch.equal(active[key], part)


def test_tensors_with_fewer_weights_than_the_rank_get_as_many_columns():
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(7, 11))
    assert [t.columns.rank for t in mapping_of(model, dim=64, rank=32).tensors] == [5, 32]


# --- the averaging identity -------------------------------------------------------------
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("std", [0.1, 1.0])
def test_averaging_latents_is_averaging_weights(generator, std):
    """Latents N(0, std^2): 0.1 is ten steps of Adam at the paper's lr 1e-2, 1.0 a hundred."""
    model = tiny_vit()
    mapping = mapping_of(model, generator=generator, dim=64, rank=32)
    zs = latents(mapping, 8, std)
    assert max(float(d.abs().max()) for d in mapping.delta(zs[0]).values()) > std / 20
    assert 0 < identity_error(mapping, clone(model), zs) <= 1e-7


def test_averaging_latents_is_averaging_weights_on_resnet18():
    model = resnet18()
    mapping = mapping_of(model, generator="sketch", dim=64, rank=32)
    base = clone(model)
    for std in (0.1, 1.0):
        assert 0 < identity_error(mapping, base, latents(mapping, 8, std)) <= 1e-7


def test_the_identity_holds_on_whole_models_as_well():
    """The figure of ``identity_error`` against K models held at once, in float32 throughout."""
    model = tiny_vit()
    base = clone(model)
    mapping = mapping_of(model)
    zs = latents(mapping, 8, 0.3)
    models = [clone(model) for _ in zs]
    for arrays, z in zip(models, zs, strict=True):
        mapping.apply_(arrays, base, z)
    center = clone(model)
    mapping.apply_(center, base, torch.stack(zs).mean(0))
    errors = [
        (torch.stack([m[t.key] for m in models]).double().mean(0) - center[t.key]).abs().max()
        for t in mapping.tensors
    ]
    assert identity_error(mapping, base, zs) == pytest.approx(float(max(errors)), rel=1e-6)


def test_the_identity_error_is_the_largest_of_any_tensor():
    """Weights of one tensor at a time that are 512 times as large have as much larger rounding."""
    model = tiny_vit()
    base = clone(model)
    mapping = mapping_of(model)
    zs = latents(mapping, 8, 0.3)
    assert len(mapping.tensors) == 9
    for tensor in mapping.tensors:
        large = base | {tensor.key: 512 * base[tensor.key]}
        assert identity_error(mapping, large, zs) > 10 * identity_error(mapping, base, zs)


def test_the_identity_error_sees_a_map_that_is_not_affine(monkeypatch):
    expand = SketchColumns.expand
    monkeypatch.setattr(SketchColumns, "expand", lambda self, w: expand(self, w * w.abs()))
    model = tiny_vit()
    mapping = mapping_of(model, generator="sketch")
    assert identity_error(mapping, clone(model), latents(mapping, 8, 1.0)) > 1e-3


# --- the gradient -----------------------------------------------------------------------
def network() -> nn.Module:
    """A small float64 network with a convolution."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(320, 7))
    generator = torch_generator(3, "weights")
    model = model.double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def loss_of(model: nn.Module) -> Tensor:
    x, y = batch()
    return F.cross_entropy(model(x.double()), y)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("memory", ["stored", "regenerated"])
def test_gathered_gradient_is_autograd_through_the_formula(generator, memory):
    model = network()
    base = clone(model)
    mapping = mapping_of(model, generator=generator, memory=memory)
    freeze_(model, mapping.selection)
    start = latents(mapping, 1, 0.5, torch.float64)[0]
    training = LatentTraining(mapping, model, start)
    loss_of(model).backward()
    training.gather()

    z = start.clone().requires_grad_()
    weights = dict(base)
    for tensor in mapping.tensors:
        u, v = tensor.columns.dense(torch.float64), tensor.basis_t.double().t()
        delta = u @ (v.t() @ z[tensor.latent])
        weights[tensor.key] = base[tensor.key] + delta.view(tensor.columns.shape)
    x, y = batch()
    loss = F.cross_entropy(torch.func.functional_call(network(), weights, (x.double(),)), y)
    (expected,) = torch.autograd.grad(loss, z)
    found = training.latent.grad
    assert found is not None and expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("generator", GENERATORS)
def test_gathered_gradient_is_the_slope_of_the_loss(generator):
    model = network()
    mapping = mapping_of(model, generator=generator)
    freeze_(model, mapping.selection)
    training = LatentTraining(mapping, model, latents(mapping, 1, 0.5, torch.float64)[0])
    loss_of(model).backward()
    training.gather()
    direction = latents(mapping, 2, 1.0, torch.float64)[1]
    slope, sides = float(training.latent.grad @ direction), []
    for step in (1e-5, -2e-5):
        training.latent.data.add_(direction, alpha=step)
        training.scatter()
        sides.append(loss_of(model).item())
    assert slope == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6)
    assert abs(slope) > 1e-3


def test_gathering_twice_adds_up_as_autograd_does():
    model = network()
    mapping = mapping_of(model)
    freeze_(model, mapping.selection)
    training = LatentTraining(mapping, model, mapping.flat_zero().double())
    grads = []
    for _ in range(2):
        loss_of(model).backward()
        training.gather()
        grads.append(training.latent.grad.clone())
    torch.testing.assert_close(grads[1], 2 * grads[0], rtol=1e-12, atol=0)


def test_weights_that_the_forward_pass_left_out_have_no_gradient():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 11))
    mapping = mapping_of(model)
    freeze_(model, mapping.selection)
    training = LatentTraining(mapping, model, mapping.flat_zero())
    model[0](torch.ones(1, 5)).sum().backward()
    training.gather()
    assert (training.latent.grad[:13] != 0).any() and (training.latent.grad[13:] == 0).all()


# --- training ---------------------------------------------------------------------------
def train(
    model: nn.Module, training: LatentTraining, steps: int, seed: int = 5, lr: float = 0.3
) -> list[float]:
    generator = torch_generator(seed, "images")
    x = torch.randn(23, 3, 10, 10, generator=generator)
    y = torch.randint(7, (23,), generator=generator)
    optimizer = torch.optim.Adam(training.parameters().values(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        training.gather()
        optimizer.step()
        optimizer.zero_grad()
        training.scatter()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("frozen", ["all", "query-key"])
def test_training_latents_lowers_the_loss_and_moves_nothing_else(generator, frozen):
    model = tiny_vit()
    base = clone(model)
    mapping = mapping_of(model, frozen, generator=generator)
    freeze_(model, mapping.selection)
    training = LatentTraining(mapping, model, mapping.flat_zero(), base)
    losses = train(model, training, 30)
    assert losses[-1] < 0.9 * losses[0]
    expected = {name: tensor.clone() for name, tensor in base.items()}
    mapping.apply_(expected, base, training.latent)
    trained = model.state_dict()
    assert all(bits(trained[name]) == bits(expected[name]) for name in base)
    active, frozen_half = mapping.selection.split(trained)
    base_active, base_frozen = mapping.selection.split(base)
    assert all(bits(frozen_half[name]) == bits(base_frozen[name]) for name in frozen_half)
    assert all((active[name] != base_active[name]).float().mean() > 0.9 for name in active)


def test_a_given_base_is_not_copied_and_stays_as_it_is():
    model = tiny_vit()
    base = clone(model)
    before = {name: bits(tensor) for name, tensor in base.items()}
    mapping = mapping_of(model)
    freeze_(model, mapping.selection)
    training = LatentTraining(mapping, model, mapping.flat_zero(), base)
    train(model, training, 2)
    assert {name: bits(tensor) for name, tensor in base.items()} == before
    addresses = {tensor.data_ptr() for tensor in base.values()}
    assert all(part.data_ptr() in addresses for part in training.base.values())


def test_training_starts_from_the_latent_it_is_given():
    model, other = tiny_vit(), tiny_vit()
    base = clone(model)
    mapping = mapping_of(model)
    z = latents(mapping, 1, 1.0)[0]
    freeze_(model, mapping.selection)
    training = LatentTraining(mapping, model, z)
    arrays = clone(other)
    mapping.apply_(arrays, base, z)
    assert all(torch.equal(model.state_dict()[name], arrays[name]) for name in arrays)
    with torch.no_grad():
        training.latent += 1
    assert not torch.equal(training.latent, z)


def test_a_round_of_two_clients_on_latents_is_a_round_on_weights():
    model = tiny_vit()
    base = clone(model)
    mapping = mapping_of(model, "query-key", generator="sketch")
    zs, weights = [], []
    for seed in (5, 6):
        client = copy.deepcopy(model)
        freeze_(client, mapping.selection)
        training = LatentTraining(mapping, client, mapping.flat_zero(), base)
        train(client, training, 7, seed, lr=0.02)
        zs.append(training.latent.detach())
        weights.append(clone(client))
    center = clone(model)
    mapping.apply_(center, base, torch.stack(zs).mean(0))
    for name, tensor in center.items():
        mean = torch.stack([w[name] for w in weights]).mean(0)
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-7)
    assert (zs[0] - zs[1]).abs().max() > 0.05
    assert all(float(view.abs().max()) < 1 for view in mapping.views(center).values())
    assert identity_error(mapping, base, zs) <= 1e-7


# --- errors -----------------------------------------------------------------------------
@pytest.mark.parametrize(("dim", "rank"), [(5, 7), (0, 0), (7, 0)])
def test_ranks_outside_the_latents_are_refused(dim, rank):
    rule = f"latent-rank must be 1..latent-dim, got rank {rank} and dim {dim}"
    with pytest.raises(ValueError, match=re.escape(rule)):
        mapping_of(tiny_vit(), dim=dim, rank=rank)


def test_a_selection_that_leaves_nothing_to_map_is_refused():
    with pytest.raises(ValueError, match="frozen='head' leaves no weight"):
        mapping_of(tiny_vit(), "head")


@pytest.mark.parametrize("z", [torch.zeros(7), torch.zeros(117, 1), torch.zeros(117).int()])
def test_latents_of_another_mapping_are_refused(z):
    model = tiny_vit()
    mapping = mapping_of(model)
    assert mapping.size == 117
    arrays = clone(model)
    for call in (
        lambda: mapping.apply_(arrays, clone(model), z),
        lambda: mapping.delta(z),
        lambda: identity_error(mapping, arrays, [z]),
    ):
        with pytest.raises(ValueError, match=r"latent must be floating point \[117\], got"):
            call()


def test_the_identity_of_no_clients_is_refused():
    mapping = mapping_of(tiny_vit())
    with pytest.raises(ValueError, match="at least one client"):
        identity_error(mapping, clone(tiny_vit()), [])


def test_weights_of_another_model_are_refused():
    model = tiny_vit()
    mapping = mapping_of(model)
    base = clone(model)
    name = "blocks.1.mlp.fc2.weight"
    wrong = [
        ({k: v for k, v in base.items() if k != name}, "got None"),
        (base | {name: torch.zeros(3, 5)}, re.escape("got [3, 5]")),
        (base | {name: base[name].int()}, "must be floating point, got torch.int32"),
    ]
    for arrays, message in wrong:
        with pytest.raises(ValueError, match=f"mapped weight '{name}' .*{message}"):
            mapping.apply_(clone(model), arrays, mapping.flat_zero())


def test_a_model_that_trains_something_else_is_refused():
    model = tiny_vit()
    mapping = mapping_of(model, "query-key")
    with pytest.raises(ValueError, match="'blocks.0.attn.proj.bias' is mapped or trains, but not"):
        LatentTraining(mapping, model, mapping.flat_zero())
    other = nn.Sequential(nn.Linear(5, 7))
    with pytest.raises(ValueError, match="freeze the model by the mapping's selection"):
        LatentTraining(mapping, other, mapping.flat_zero())
