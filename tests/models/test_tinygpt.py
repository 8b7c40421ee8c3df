"""Claims about the small GPT: its size, its equations, its names, and what freezes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.models.attention import value_rows
from fedfrozen_app.models.freeze import freeze_, trainable_parameters
from fedfrozen_app.models.head import never_trained
from fedfrozen_app.models.registry import create_model, model_spec
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.models.tinygpt import Size, TinyGPT
from fedfrozen_app.models.weights import check_weights, load_weights


def config(model: str = "tinygpt", **keys: Any) -> RunConfig:
    own = {key.replace("_", "-"): value for key, value in keys.items()}
    return RunConfig.from_mapping(
        {
            "model": model,
            "dataset": "wikitext2",
            "partitioner": "iid",
            "weights": "none",
            "device": "cpu",
            **own,
        }
    )


def small(context_length: int = 11) -> TinyGPT:
    torch.manual_seed(3)
    model = TinyGPT(Size(2, 12, 3), vocabulary=29, context_length=context_length)
    with torch.no_grad():  # larger than the initial values, so that attention is not near uniform
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return model.eval()


def test_tinygpt_has_the_papers_size() -> None:
    model = create_model(config(), 2048, init=False)
    count = {name: math.prod(p.shape) for name, p in model.named_parameters()}
    assert sum(count.values()) == 11_483_136
    assert sum(n for name, n in count.items() if name.startswith("blocks.")) == 10_646_784
    assert count["head.weight"] == 786_432 and count["pos_embed"] == 49_152
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 36 + 1 and linear[-1] == "head"


def test_the_embedding_stands_in_the_state_dict_once() -> None:
    model = small()
    assert sum(1 for t in model.state_dict().values() if tuple(t.shape) == (29, 12)) == 1
    before = model(torch.tensor([[5, 7]]))
    with torch.no_grad():
        model.head.weight[5] *= 2
    after = model(torch.tensor([[5, 7]]))
    assert not torch.equal(before[..., 5], after[..., 5])  # as output
    assert not torch.equal(before[..., 7], after[..., 7])  # as input


def test_logits_are_those_of_the_equations() -> None:
    model, tokens = small(), torch.randint(0, 29, (2, 7), generator=torch.Generator())
    s = model.state_dict()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * s[f"{name}.weight"] + s[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    x = s["head.weight"][tokens] + s["pos_embed"][0, :7]
    for i in range(2):
        h = norm(x, f"blocks.{i}.norm1")
        q, k, v = (linear(h, f"blocks.{i}.attn.{n}_proj") for n in "qkv")
        mixed = torch.zeros_like(x)
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            for t in range(7):
                scores = (k[:, : t + 1, part] @ q[:, t, part, None])[..., 0] / 4**0.5
                weights = scores.softmax(-1)
                mixed[:, t, part] = (weights[..., None] * v[:, : t + 1, part]).sum(1)
        x = x + linear(mixed, f"blocks.{i}.attn.out_proj")
        h = linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")
        h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
        x = x + linear(h, f"blocks.{i}.mlp.fc2")
    expected = norm(x, "norm") @ s["head.weight"].T
    assert (model(tokens) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_no_token_sees_those_after_it() -> None:
    model = small()
    one = torch.randint(0, 29, (3, 11), generator=torch.Generator())
    other = one.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 29
    assert torch.equal(model(one)[:, :6], model(other)[:, :6])
    assert not torch.equal(model(one)[:, 6], model(other)[:, 6])


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="has 12 tokens and the model's context-length is 11"):
        small()(torch.zeros(1, 12, dtype=torch.int64))
    assert model_spec(config(context_length=17)).context_length == 17


def test_values_come_from_the_seed_and_start_as_gpt_2() -> None:
    torch.manual_seed(1)
    first = create_model(config("tinygpt-mini"), 131).state_dict()
    torch.manual_seed(2)
    again = create_model(config("tinygpt-mini"), 131).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["blocks.0.attn.q_proj.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert first["blocks.1.mlp.fc2.weight"].std() == pytest.approx(0.02 / 2, rel=0.03)
    assert first["blocks.1.attn.v_proj.bias"].count_nonzero() == 0
    assert torch.equal(first["norm.weight"], torch.ones(128))


@pytest.mark.parametrize(
    ("frozen", "trains"), [("query-key", 9_709_056), ("value-head", 1_673_472), ("head", 786_432)]
)
def test_the_presets_know_its_names(frozen: str, trains: int) -> None:
    state = create_model(config(), 2048, init=False).state_dict()
    selection = Selection.build(frozen, state)
    assert selection.num_active == trains
    assert not any(entry.is_partial for entry in selection.entries)


def test_value_rows_are_the_value_projections() -> None:
    rows = value_rows(small().state_dict())
    assert list(rows) == ["blocks.0.attn.v_proj.weight", "blocks.1.attn.v_proj.weight"]


def test_frozen_projections_get_no_gradient_and_the_others_do() -> None:
    model = small()
    freeze_(model, Selection.build("query-key", model.state_dict()))
    model(torch.zeros(1, 5, dtype=torch.int64)).square().mean().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    ends = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
    assert without == {f"blocks.{i}.attn.{end}" for i in range(2) for end in ends}
    assert trainable_parameters(model).keys() == dict(model.named_parameters()).keys() - without


def test_a_frozen_head_is_the_token_embedding_with_orthonormal_columns() -> None:
    one = config("tinygpt-mini", head="frozen-orthogonal")
    state = create_model(one, 211).state_dict()
    weight = state["head.weight"]
    assert (weight.T @ weight - torch.eye(128)).abs().max() < 1e-5
    assert never_trained("frozen-orthogonal", state) == "head.*"


def test_bf16_logits_are_near_those_of_fp32() -> None:
    model = create_model(config("tinygpt-mini"), 131)
    tokens = torch.randint(0, 131, (2, 17), generator=torch.Generator())
    exact = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(tokens)
    assert rounded.dtype == torch.bfloat16
    assert 0 < (rounded - exact).abs().max() < 0.02 * exact.abs().max()


def test_weights_of_another_vocabulary_or_context_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(create_model(config("tinygpt-mini"), 131).state_dict(), path)
    one = config("tinygpt-mini", seed=2)
    model = create_model(one, 131)
    load_weights(model, str(path), one)
    assert torch.equal(model.state_dict()["head.weight"], torch.load(path)["head.weight"])
    with pytest.raises(ConfigError, match=r"head.weight \[131, 128\] instead of \[127, 128\]"):
        load_weights(create_model(one, 127), str(path), one)
    shorter = config("tinygpt-mini", context_length=64)
    with pytest.raises(ConfigError, match=r"pos_embed \[1, 128, 128\] instead of \[1, 64, 128\]"):
        load_weights(create_model(shorter, 131), str(path), shorter)


def test_there_is_nothing_pretrained() -> None:
    with pytest.raises(ConfigError, match="tinygpt has no weights on the hub; train some with"):
        check_weights(config(weights="pretrained"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "vit-digits"}, "dataset=wikitext2 is text and model=vit-digits reads images"),
        ({"dataset": "digits"}, "model=tinygpt reads text and dataset=digits holds images"),
        ({"partitioner": "dirichlet"}, "partitioner=dirichlet divides classes and text has none"),
        ({"partitioner": "shard"}, "partitioner=shard divides classes and text has none"),
        ({"image-size": 32}, "image-size=32 is for images"),
        ({"augment": "crop"}, "augment=crop is for images"),
        ({"model": "vit-digits", "dataset": "digits", "context-length": 17}, "has no effect with"),
    ],
)
def test_text_and_images_are_not_mixed_up(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**{key.replace("-", "_"): value for key, value in keys.items()})


def test_wikitext2_is_for_tinygpt_by_default() -> None:
    one = config(model="auto")
    assert one.resolved_model == "tinygpt" and one.reads_text
    assert not RunConfig().reads_text
