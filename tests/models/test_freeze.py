"""Freezing a module: frozen rows never move and cost nothing, the library sees its own model."""

import copy
import io
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedfrozen_app.models.attention import value_rows
from fedfrozen_app.models.freeze import (
    freeze_,
    frozen_selection,
    train_mode_,
    trainable_parameters,
    unfreeze_,
)
from fedfrozen_app.models.fused import Fused
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.seeds import torch_generator

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# --- families: one tiny model per way of keeping queries, keys and values -----------------
@dataclass
class Family:
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    heads: bool = True

    def model(self) -> nn.Module:
        """Return the model with every parameter drawn, so that no gradient is trivially 0."""
        model = self.build()
        generator = torch_generator(3, "weights")
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
        return model.eval()


def images(size: int, name: str = "x") -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(3, 3, size, size, generator=torch_generator(5, "images"))}


def tokens(**more: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    def draw() -> dict[str, Tensor]:
        ids = torch.randint(3, 11, (3, 7), generator=torch_generator(5, "tokens"))
        return {"input_ids": ids, **{name: make() for name, make in more.items()}}

    return draw


def timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=14, depth=2, num_heads=2, num_classes=5
    )


def timm_beit() -> nn.Module:
    from timm.models.beit import Beit

    return Beit(img_size=8, patch_size=4, embed_dim=14, depth=2, num_heads=2, num_classes=5)


def timm_eva() -> nn.Module:
    from timm.models.eva import Eva

    return Eva(
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=5,
        qkv_fused=False,
        use_rot_pos_emb=True,
    )


def timm_swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=16,
        patch_size=2,
        window_size=4,
        embed_dim=14,
        depths=(2,),
        num_heads=(2,),
        num_classes=5,
    )


def timm_pvt() -> nn.Module:
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    return PyramidVisionTransformerV2(
        depths=(1, 1, 1, 1),
        embed_dims=(14, 14, 14, 14),
        num_heads=(1, 2, 2, 2),
        mlp_ratios=(2, 2, 2, 2),
        num_classes=5,
    )


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=8,
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=14,
        mlp_dim=11,
        num_classes=5,
    )


def torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 14, [2], [2], [4, 4], num_classes=5, stochastic_depth_prob=0.0)


class Encoder(nn.Module):
    """A torch encoder with a head, as people write it by hand."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(14, 2, 11, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(14, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.fc(self.encoder(x, src_key_padding_mask=mask).mean(1))


def encoder_inputs() -> dict[str, Tensor]:
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[1, 5:] = True
    return {"x": torch.randn(3, 7, 14, generator=torch_generator(5, "x")), "mask": mask}


def transformers_model(name: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        family = re.split("For|LMHead", name)[0]
        config = getattr(transformers, f"{family}Config")(**settings)
        return getattr(transformers, name)(config)

    return build


BERT = {
    "hidden_size": 14,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 11,
    "vocab_size": 13,
    "max_position_embeddings": 17,
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**BERT, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {
    "n_embd": 14,
    "n_head": 2,
    "n_layer": 2,
    "vocab_size": 13,
    "n_positions": 17,
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DISTIL = {
    "dim": 14,
    "n_heads": 2,
    "n_layers": 2,
    "hidden_dim": 11,
    "vocab_size": 13,
    "max_position_embeddings": 17,
    "num_labels": 5,
    "pad_token_id": 0,
}
VIT = {
    "hidden_size": 14,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 11,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
T5 = {
    "d_model": 14,
    "d_kv": 7,
    "num_heads": 2,
    "num_layers": 1,
    "vocab_size": 13,
    "d_ff": 11,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}

FAMILIES = {
    "timm-vit": Family(timm_vit, images(8)),
    "timm-beit": Family(timm_beit, images(8)),
    "timm-eva": Family(timm_eva, images(8)),
    "timm-swin": Family(timm_swin, images(16)),
    "timm-pvt": Family(timm_pvt, images(32)),
    "torchvision-vit": Family(torchvision_vit, images(8)),
    "torchvision-swin": Family(torchvision_swin, images(16)),
    "torch-encoder": Family(Encoder, encoder_inputs),
    "hf-vit": Family(
        transformers_model("ViTForImageClassification", **VIT), images(8, "pixel_values")
    ),
    "hf-bert": Family(transformers_model("BertForSequenceClassification", **BERT), tokens()),
    "hf-roberta": Family(transformers_model("RobertaForSequenceClassification", **BERT), tokens()),
    "hf-distilbert": Family(
        transformers_model("DistilBertForSequenceClassification", **DISTIL), tokens()
    ),
    "hf-gpt2": Family(transformers_model("GPT2ForSequenceClassification", **GPT2), tokens()),
    "hf-llama": Family(transformers_model("LlamaForSequenceClassification", **LLAMA), tokens()),
    "hf-t5": Family(
        transformers_model("T5ForConditionalGeneration", **T5),
        tokens(decoder_input_ids=lambda: torch.tensor([[0, 5, 7], [0, 3, 4], [0, 11, 2]])),
        heads=False,
    ),
}
FUSED = ("timm-vit", "timm-beit", "timm-swin", "torchvision-vit", "torch-encoder", "hf-gpt2")


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the model's logits."""
    out = model(**inputs)
    return out if isinstance(out, Tensor) else out.logits


def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return a loss to which every logit adds a different gradient."""
    logits = output(model, inputs).float()
    weights = torch.linspace(-1.0, 2.0, logits.numel()).reshape(logits.shape)
    return (logits * weights).sum() + (logits**2).mean()


def plain_copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def select(model: nn.Module, frozen: str) -> Selection:
    return Selection.build(frozen, model.state_dict())


cases = [
    (family, frozen)
    for family in FAMILIES
    for frozen in ("query-key", "value-head", "*[key]")
    if FAMILIES[family].heads or frozen != "value-head"
]


# --- the laws -----------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "frozen"), cases)
def test_frozen_model_computes_the_same_and_has_the_same_gradients(name: str, frozen: str) -> None:
    family = FAMILIES[name]
    plain, model, inputs = family.model(), family.model(), family.inputs()
    selection = select(plain, frozen)
    freeze_(model, selection)
    expected, actual = output(plain, inputs), output(model, inputs)
    assert actual.requires_grad
    assert torch.equal(actual, expected)
    loss(plain, inputs).backward()
    loss(model, inputs).backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    expected_parts = selection.parts(selection.restrict(gradients))
    trained = trainable_parameters(model)
    assert {n for n, p in trained.items() if p.grad is not None} == set(expected_parts)
    for key, gradient in expected_parts.items():
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(
            trained[key].grad, gradient, rtol=1e-6, atol=1e-6 * scale, msg=key
        )


@pytest.mark.parametrize(("name", "frozen"), cases)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_frozen_rows_stay_bit_identical_under_momentum_and_weight_decay(
    name: str, frozen: str, optimizer: str
) -> None:
    family = FAMILIES[name]
    model, fresh, inputs = family.model(), family.build(), family.inputs()
    before = plain_copy(model.state_dict())
    selection = select(model, frozen)
    loss(model, inputs).backward()  # gradients left over from before the freeze
    freeze_(model, selection)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    }[optimizer]
    step = make(model.parameters())
    for _ in range(3):
        loss(model, inputs).backward()
        step.step()
        step.zero_grad()
    after = model.state_dict()
    assert list(after) == list(before)
    active, frozen_half = selection.split(after)
    old_active, old_frozen = selection.split(before)
    for entry, tensor in frozen_half.items():
        assert torch.equal(tensor, old_frozen[entry]), entry
    trained = {n.split("#")[0] for n in trainable_parameters(model)}
    assert trained
    assert all(not torch.equal(active[n], old_active[n]) for n in trained)
    assert trained == {n for n, p in fresh.named_parameters() if p.requires_grad} & set(active)
    fresh.load_state_dict(after, strict=True)
    with torch.no_grad():
        assert torch.equal(output(fresh.eval(), inputs), output(model, inputs))


@pytest.mark.parametrize(("name", "frozen"), cases)
def test_merge_of_split_is_bit_identical_for_every_library(name: str, frozen: str) -> None:
    state = FAMILIES[name].model().state_dict()
    arrays = {entry: tensor.numpy() for entry, tensor in state.items()}
    selection = Selection.build(frozen, arrays)
    for whole in (state, arrays):
        active, frozen_half = selection.split(whole)
        merged = selection.merge(active, frozen_half)
        assert list(merged) == list(state)
        assert all(np.array_equal(merged[n], whole[n]) for n in state)
        again = selection.split(merged)
        for half, other in zip((active, frozen_half), again, strict=True):
            assert list(half) == list(other)
            assert all(np.array_equal(half[n], other[n]) for n in half)


@pytest.mark.parametrize("name", FAMILIES)
def test_unfreeze_gives_back_the_plain_module(name: str) -> None:
    family = FAMILIES[name]
    plain, model, inputs = family.model(), family.model(), family.inputs()
    freeze_(model, select(model, "*[key]" if name in FUSED else "query-key"))
    assert frozen_selection(model) is not None
    unfreeze_(model)
    assert frozen_selection(model) is None
    for (path, module), (other_path, other) in zip(
        model.named_modules(), plain.named_modules(), strict=True
    ):
        assert path == other_path
        assert type(module) is type(other)
        assert vars(module).keys() == vars(other).keys()
        assert list(module._parameters) == list(other._parameters)
        assert list(module._buffers) == list(other._buffers)
    for (key, tensor), (other_key, other) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert key == other_key
        assert tensor.requires_grad == other.requires_grad
        assert torch.equal(tensor, other)
    assert torch.equal(output(model, inputs), output(plain, inputs))


# --- frozen rows are free -----------------------------------------------------------------
TOKENS = {"timm-vit": 5, "timm-beit": 5, "torchvision-vit": 5, "torch-encoder": 7, "hf-gpt2": 7}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("frozen", ["query-key", "*[key]", "*[query]"])
def test_frozen_rows_cost_no_weight_gradient(name: str, frozen: str) -> None:
    family = FAMILIES[name]
    plain, model, inputs = family.model(), family.model(), family.inputs()
    selection = select(model, frozen)
    freeze_(model, selection)
    counts = []
    for each in (plain, model):
        with FlopCounterMode(display=False) as counter:
            loss(each, inputs).backward()
        counts.append(counter.get_total_flops())
    weights = [shape for shape in selection.frozen_shapes().values() if len(shape) == 2]
    examples = 3
    saved = sum(2 * examples * TOKENS[name] * rows * columns for rows, columns in weights)
    assert saved > 0
    assert counts[0] - counts[1] == saved


@pytest.mark.parametrize("name", FUSED)
def test_optimiser_state_covers_the_active_numbers_only(name: str) -> None:
    model, inputs = FAMILIES[name].model(), FAMILIES[name].inputs()
    selection = select(model, "value-head")
    freeze_(model, selection)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss(model, inputs).backward()
    optimizer.step()
    held = sum(state["momentum_buffer"].numel() for state in optimizer.state.values())
    assert held == selection.num_active
    assert sum(p.numel() for p in trainable_parameters(model).values()) == held


def test_active_rows_view_the_fused_memory() -> None:
    model = timm_vit()
    weight = model.blocks[0].attn.qkv.weight
    freeze_(model, select(model, "query-key"))
    rows = trainable_parameters(model)["blocks.0.attn.qkv.weight"]
    assert rows.shape == (14, 14)
    assert rows.data_ptr() == weight.data_ptr() + 2 * 14 * 14 * 4
    unfreeze_(model)
    assert model.blocks[0].attn.qkv.weight.data_ptr() == weight.data_ptr()


# --- the tie between rows and memory ------------------------------------------------------
def replace_data(model: nn.Module) -> nn.Module:
    for parameter in trainable_parameters(model).values():
        parameter.data = parameter.data.clone()
    return model


def assign_state(model: nn.Module) -> nn.Module:
    model.load_state_dict(plain_copy(model.state_dict()), strict=True, assign=True)
    return model


def save_and_load(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


BREAKS = {
    "nothing": lambda model: model,
    "to-float64": lambda model: model.double(),
    "to-bfloat16-and-back": lambda model: model.bfloat16().float(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch-save": save_and_load,
    "load-assign": assign_state,
    "parameter-data": replace_data,
}


@pytest.mark.parametrize("break_tie", BREAKS)
@pytest.mark.parametrize("name", FUSED)
def test_active_rows_stay_tied_to_the_fused_weight(name: str, break_tie: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.model(), family.inputs()
    selection = select(model, "*[key]")
    freeze_(model, selection)
    before = plain_copy(model.state_dict())
    model = BREAKS[break_tie](model)
    assert frozen_selection(model) == selection
    state = model.state_dict()
    rounded = break_tie == "to-bfloat16-and-back"
    for entry, tensor in state.items():
        expected = before[entry].bfloat16() if rounded else before[entry]
        assert torch.equal(tensor, expected.to(tensor.dtype)), entry
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.fill_(0.25)
    active, frozen = selection.split(plain_copy(model.state_dict()))
    _, old_frozen = selection.split(state)
    trained = {key.split("#")[0] for key in trainable_parameters(model)}
    assert all(torch.equal(frozen[n], old_frozen[n]) for n in frozen)
    assert all((active[n] == 0.25).all() for n in trained)
    fresh = family.build().eval()
    fresh.load_state_dict(model.state_dict(), strict=True)
    cast = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    inputs = cast if break_tie == "to-float64" else inputs
    fresh = fresh.double() if break_tie == "to-float64" else fresh
    assert torch.equal(output(model, inputs), output(fresh, inputs))


def test_newest_values_win_whichever_side_was_replaced() -> None:
    model = timm_vit()
    freeze_(model, select(model, "query-key"))
    module, name = model.blocks[0].attn.qkv, "blocks.0.attn.qkv.weight"
    rows = trainable_parameters(model)[name]
    frozen = module.weight.detach()[:28].clone()
    rows.data = torch.full((14, 14), 2.0)
    assert (module.weight.detach()[28:] == 2.0).all()
    assert torch.equal(module.weight.detach()[:28], frozen)
    rows.data = torch.full((14, 14), 3.0)
    model.double()
    assert (model.state_dict()[name][28:] == 3.0).all()
    module._buffers["weight"] = torch.full((42, 14), 4.0, dtype=torch.float64)
    assert (trainable_parameters(model)[name] == 4.0).all()
    module.weight.data = torch.full((42, 14), 5.0, dtype=torch.float64)
    assert (trainable_parameters(model)[name] == 5.0).all()
    assert trainable_parameters(model)[name] is rows
    rows.data = torch.ones(3, 14)
    with pytest.raises(
        ValueError, match=r"partly frozen 'weight' must keep shape \[14, 14\], got \[3, 14\]"
    ):
        model.state_dict()


def test_loading_a_state_dict_keeps_parameters_and_optimisers_alive() -> None:
    model = timm_vit()
    freeze_(model, select(model, "query-key"))
    rows = trainable_parameters(model)["blocks.0.attn.qkv.weight"]
    optimizer = torch.optim.SGD([rows], lr=1.0)
    state = {n: torch.ones_like(t) for n, t in model.state_dict().items()}
    model.load_state_dict(state, strict=True)
    rows.grad = torch.full((14, 14), 0.5)
    optimizer.step()
    weight = model.state_dict()["blocks.0.attn.qkv.weight"]
    assert (weight[:28] == 1.0).all() and (weight[28:] == 0.5).all()
    model.load_state_dict({n: t + 1.0 for n, t in state.items()}, strict=True, assign=True)
    assert (rows == 2.0).all()
    with pytest.raises(RuntimeError, match="Missing key.*blocks.0.attn.qkv.weight"):
        model.load_state_dict({n: t for n, t in state.items() if "0.attn.qkv.weight" not in n})


def test_the_order_of_parameters_is_fixed_and_outlives_loading() -> None:
    model = attention()
    freeze_(model, select(model, "*[key]"))
    names = [f"in_proj_{kind}_active{i}" for kind in ("weight", "bias") for i in ("", "1")]
    for _ in range(2):
        assert [n for n, _ in model.named_parameters() if "out" not in n] == names
        model.load_state_dict(plain_copy(model.state_dict()))


def test_state_dict_keeps_the_librarys_order_where_only_weights_are_partly_frozen() -> None:
    model = Encoder()
    names = list(model.state_dict())
    freeze_(model, select(model, "*in_proj_weight[key], fc.bias[0:2]"))
    assert list(model.state_dict()) == names
    assert list(model.fc.state_dict(prefix="x.")) == ["x.weight", "x.bias"]


def test_a_model_made_on_the_meta_device_can_be_frozen_before_it_has_values() -> None:
    with torch.device("meta"):
        model = timm_vit()
    selection = select(model, "query-key")
    freeze_(model, selection)
    state = FAMILIES["timm-vit"].model().state_dict()
    model.to_empty(device="cpu").load_state_dict(state, strict=True)
    active, _ = selection.split(state)
    trained = trainable_parameters(model)
    assert len(trained) == len(active)
    assert all(torch.equal(trained[n], active[n]) for n in active)


def test_assigning_a_whole_weight_replaces_its_active_rows() -> None:
    model = nn.Linear(7, 12)
    freeze_(model, select(model, "weight[0:5]"))
    model.weight = nn.Parameter(torch.full((12, 7), 2.0))
    assert (trainable_parameters(model)["weight"] == 2.0).all()
    assert list(dict(model.named_parameters())) == ["bias", "weight_active"]
    with pytest.raises(ValueError, match=r"must keep shape \[12, 7\], got \[3, 7\]"):
        model.weight = torch.ones(3, 7)


def test_refreezing_is_idempotent_and_other_selections_replace_it() -> None:
    model, inputs = timm_vit().eval(), images(8)()
    first = select(model, "query-key")
    freeze_(model, first)
    kept = trainable_parameters(model)
    freeze_(model, select(model, "query-key"))
    again = trainable_parameters(model)
    assert list(again) == list(kept)
    assert all(again[n] is kept[n] for n in kept)
    freeze_(model, Selection.build("value-head", model.state_dict()))
    assert set(trainable_parameters(model)) == {
        "head.weight",
        "head.bias",
        *(f"blocks.{i}.attn.qkv.{kind}" for i in (0, 1) for kind in ("weight", "bias")),
    }
    freeze_(model, Selection.build("all", model.state_dict()))
    loss(model, inputs).backward()
    assert model.blocks[0].attn.qkv.weight.grad.shape == (42, 14)
    assert len(trainable_parameters(model)) == len(list(timm_vit().parameters()))


def test_parameters_fixed_before_the_freeze_stay_fixed_after_it() -> None:
    model = timm_vit()
    model.pos_embed.requires_grad_(False)
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    freeze_(model, select(model, "query-key"))
    trained = trainable_parameters(model)
    assert "pos_embed" not in trained and "blocks.0.attn.qkv.weight" not in trained
    assert "blocks.0.attn.qkv.bias" in trained
    loss(model, images(8)()).backward()
    unfreeze_(model)
    fixed = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert fixed == {"pos_embed", "blocks.0.attn.qkv.weight"}


def test_several_active_ranges_are_numbered_parts_of_one_entry() -> None:
    model = timm_vit()
    selection = select(model, "*[key]")
    freeze_(model, selection)
    trained = trainable_parameters(model)
    name = "blocks.1.attn.qkv.weight"
    assert name not in trained
    assert [trained[f"{name}#{i}"].shape for i in (0, 1)] == [(14, 14), (14, 14)]
    active, _ = selection.split(model.state_dict())
    parts = selection.parts(active)
    assert list(parts) == list(trained)
    assert all(torch.equal(parts[key], trained[key]) for key in trained)


def test_value_rows_are_found_among_trainable_parameters() -> None:
    model = timm_vit()
    rows = value_rows(model.state_dict())
    for frozen, dims in (("query-key", (0, 14)), ("*[query]", (14, 28)), ("all", (28, 42))):
        selection = select(model, frozen)
        freeze_(model, selection)
        trained = trainable_parameters(model)
        whole = model.state_dict()["blocks.1.attn.qkv.weight"][28:42]
        dim, start, stop = selection.locate(rows)["blocks.1.attn.qkv.weight"]
        assert (dim, start, stop) == (0, *dims)
        part = trained["blocks.1.attn.qkv.weight"].narrow(dim, start, stop - start)
        assert torch.equal(part, whole)


# --- attention modules, precision, statistics ---------------------------------------------
def attention(**settings: object) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(14, 2, **settings)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=torch_generator(7, "mha")) * 0.3)
    return module


ATTENTION_CALLS = {
    "self": ({"batch_first": True}, "xxx", {}),
    "sequence-first-with-weights": ({}, "xxx", {"need_weights": True}),
    "cross": ({"batch_first": True}, "xyy", {"need_weights": False}),
    "three-inputs": ({"batch_first": True}, "xyz", {"average_attn_weights": False}),
    "key-and-value-sizes": ({"kdim": 11, "vdim": 13}, "xkv", {}),
    "key-and-value-bias": ({"batch_first": True, "add_bias_kv": True}, "xxx", {}),
    "zero-attention": ({"batch_first": True, "add_zero_attn": True, "bias": False}, "xxx", {}),
    "padding-mask": ({"batch_first": True}, "xyy", {"key_padding_mask": True}),
}


@pytest.mark.parametrize("frozen", ["query-key", "*[key]", "*[value]", "in_proj_*[5:23]"])
@pytest.mark.parametrize("call", ATTENTION_CALLS)
def test_multihead_attention_is_the_same_however_it_is_called(call: str, frozen: str) -> None:
    settings, sources, options = ATTENTION_CALLS[call]
    plain, model = attention(**settings), attention(**settings)
    if call == "key-and-value-sizes" and frozen.startswith("in_proj"):
        frozen = "in_proj_bias[5:23]"
    selection = select(plain, frozen)
    freeze_(model, selection)
    if options.get("key_padding_mask"):
        mask = torch.zeros(3, 7, dtype=torch.bool)
        mask[0, 4:] = True
        options = {"key_padding_mask": mask, "need_weights": False}
    widths = {"x": 14, "y": 14, "z": 14, "k": 11, "v": 13}
    grads, outs = [], []
    for module in (plain, model):
        inputs = {
            key: torch.randn(3, 7, width, generator=torch_generator(9, key)).requires_grad_()
            for key, width in widths.items()
        }
        out, weights = module(*(inputs[key] for key in sources), **options)
        total = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()
        (total if weights is None else total + (weights**2).sum()).backward()
        outs.append((out, weights))
        grads.append([inputs[key].grad for key in sorted(set(sources))])
    for actual, expected in zip(outs[1], outs[0], strict=True):
        assert (actual is expected is None) or torch.equal(actual, expected)
    for actual, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    expected_parts = selection.parts(
        selection.restrict({n: p.grad for n, p in plain.named_parameters()})
    )
    trained = trainable_parameters(model)
    assert set(trained) == set(expected_parts)
    for key, expected in expected_parts.items():
        torch.testing.assert_close(trained[key].grad, expected, rtol=1e-6, atol=1e-5, msg=key)


def test_eval_keeps_the_fast_path_of_torch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Encoder().eval(), encoder_inputs()
    plain = copy.deepcopy(model)
    freeze_(model, select(model, "query-key"))
    calls = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a, **k: calls.append(1) or fast(*a, **k)
    )
    with torch.inference_mode():
        assert torch.equal(model(**inputs), plain(**inputs))
    assert len(calls) == 4


@pytest.mark.parametrize("name", FUSED)
def test_autocast_gives_the_gradients_of_the_unfrozen_model(name: str) -> None:
    family = FAMILIES[name]
    plain, model, inputs = family.model(), family.model(), family.inputs()
    selection = select(model, "query-key")
    freeze_(model, selection)
    outs = []
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs.append(output(each, inputs))
            total = loss(each, inputs)
        total.backward()
    assert torch.equal(outs[0], outs[1])
    expected_parts = selection.parts(
        selection.restrict({n: p.grad for n, p in plain.named_parameters()})
    )
    for key, parameter in trainable_parameters(model).items():
        assert parameter.grad.dtype == torch.float32
        expected = expected_parts[key]
        tolerance = 2**-7 * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(parameter.grad, expected, rtol=2**-7, atol=tolerance, msg=key)


def test_autocast_saves_the_cast_tensors_not_the_full_ones() -> None:
    model = timm_vit()
    freeze_(model, select(model, "query-key"))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.blocks[0].attn.qkv(torch.randn(3, 5, 14, requires_grad=True))
    assert [tuple(t.shape) for t in saved] == [(3, 5, 14), (42, 14)]
    assert {t.dtype for t in saved} == {torch.bfloat16}


def test_any_other_use_of_a_fused_weight_has_right_gradients() -> None:
    model = nn.Linear(7, 12)
    plain = copy.deepcopy(model)
    freeze_(model, select(model, "weight[0:5]"))
    assert isinstance(model.weight, Fused)
    for module in (plain, model):
        (module.weight.pow(2).sum() + (module.weight.t() @ module.weight).sum()).backward()
    rows = trainable_parameters(model)["weight"]
    assert torch.equal(rows.grad, plain.weight.grad[5:])
    assert rows.grad.shape == (7, 7)


def test_frozen_running_statistics_do_not_move_in_train_mode() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 5), nn.BatchNorm1d(5))

    model = build()
    freeze_(model, select(model, "0.*"))
    before = plain_copy(model.state_dict())
    train_mode_(model)
    assert [module.training for module in model] == [False, True, True]
    model(torch.randn(11, 7, generator=torch_generator(1, "x"))).sum().backward()
    state = model.state_dict()
    assert all(torch.equal(state[n], before[n]) for n in state if n.startswith("0."))
    assert not torch.equal(state["2.running_mean"], before["2.running_mean"])
    unfreeze_(model)
    train_mode_(model)
    assert all(module.training for module in model)


# --- what cannot be frozen ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("entry", "owner"),
    [("norm.weight", "LayerNorm"), ("pos_embed", "VisionTransformer")],
)
def test_modules_without_an_adapter_are_refused_and_left_alone(entry: str, owner: str) -> None:
    model = timm_vit()
    selection = select(model, f"query-key, {entry}[0:1]" if "." in entry else entry + "[0:1]")
    if entry == "pos_embed":
        selection = Selection.build("pos_embed[0:2]", {**model.state_dict(), entry: torch.ones(5)})
        model.pos_embed = nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match=f"{entry}.* cannot be partly frozen: {owner} has no"):
        freeze_(model, selection)
    assert frozen_selection(model) is None
    assert all(p.requires_grad for p in model.parameters())
    kept = select(model, "query-key")
    freeze_(model, kept)
    with pytest.raises(ValueError, match="cannot be partly frozen"):
        freeze_(model, selection)
    assert frozen_selection(model) is kept
    assert trainable_parameters(model)["blocks.0.attn.qkv.weight"].shape == (14, 14)


def test_a_selection_of_another_model_is_refused() -> None:
    model = timm_vit()
    with pytest.raises(ValueError, match="has shape .5, 14. in the model and .7, 14."):
        freeze_(
            model,
            Selection.build("query-key", {**model.state_dict(), "head.weight": torch.ones(7, 14)}),
        )
    with pytest.raises(ValueError, match="the model has no entry 'extra'"):
        freeze_(model, Selection.build("query-key", {**model.state_dict(), "extra": torch.ones(2)}))
    with pytest.raises(ValueError, match="entry 'bias' is not in the selection of 1 entries"):
        freeze_(nn.Linear(7, 5), Selection.build("weight[0:1]", {"weight": torch.ones(5, 7)}))


def test_a_tied_parameter_must_be_frozen_under_all_its_names() -> None:
    model = transformers_model("GPT2LMHeadModel", **GPT2)()
    with pytest.raises(ValueError, match="wte.weight' and 'lm_head.weight' are one tied parameter"):
        freeze_(model, select(model, "head"))
    freeze_(model, select(model, "head, !transformer.wte.weight"))
    assert list(trainable_parameters(model)) == ["transformer.wte.weight"]
    pair = nn.ModuleDict({"a": nn.Linear(7, 6), "b": nn.Linear(7, 6)})
    pair["b"].weight = pair["a"].weight
    with pytest.raises(ValueError, match="'a.weight' and 'b.weight' .* cannot be partly frozen"):
        freeze_(pair, select(pair, "*.weight[0:3]"))


def test_fused_optimisers_are_refused_on_columns_and_work_on_rows() -> None:
    model, inputs = FAMILIES["hf-gpt2"].model(), tokens()()
    freeze_(model, select(model, "query-key"))
    loss(model, inputs).backward()
    before = plain_copy(model.state_dict())
    with pytest.raises(ValueError, match=r"SGD\(fused=True\) cannot update column slices"):
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    vit = timm_vit()
    selection = select(vit, "query-key")
    freeze_(vit, selection)
    loss(vit, images(8)()).backward()
    before = plain_copy(vit.state_dict())
    torch.optim.AdamW(vit.parameters(), lr=0.1, weight_decay=0.1, fused=True).step()
    _, frozen = selection.split(vit.state_dict())
    assert all(torch.equal(t, selection.split(before)[1][n]) for n, t in frozen.items())
    assert not torch.equal(vit.state_dict()["head.weight"], before["head.weight"])
