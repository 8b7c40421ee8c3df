"""Claims about ResNets with GroupNorm and a 3x3 stem: the FLITE paper's models and their size."""

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision.models import resnet18

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import run_federation
from fedfrozen_app.engine.start import prepare
from fedfrozen_app.models.registry import create_model, model_spec
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.models.weights import load_weights


def config(model: str = "resnet18-gn", **keys: Any) -> RunConfig:
    own = {key.replace("_", "-"): value for key, value in keys.items()}
    return RunConfig.from_mapping(
        {"model": model, "weights": "none", "strategy": "fedavg", "device": "cpu", **own}
    )


def shapes(model: str, num_classes: int) -> dict[str, torch.Tensor]:
    return create_model(config(model), num_classes, init=False).state_dict()


@pytest.mark.parametrize(
    ("model", "num_classes", "tensors", "weights", "total"),
    [
        ("resnet18-gn", 100, 20, 11_159_232, 11_220_132),  # arXiv:2607.18343, section 4
        ("resnet34-gn", 200, 36, 21_259_968, 21_379_592),
        # arXiv:1512.03385, section 4.2: 18 3x3 convolutions, the stem, and here two shortcuts
        ("resnet20-gn", 10, 21, 270_256, 272_474),
    ],
)
def test_the_models_are_of_their_papers_size(
    model: str, num_classes: int, tensors: int, weights: int, total: int
) -> None:
    state = shapes(model, num_classes)
    mapped = [t for name, t in state.items() if t.ndim > 1 and not name.startswith("fc.")]
    assert len(mapped) == tensors
    assert sum(math.prod(tensor.shape) for tensor in mapped) == weights
    assert sum(math.prod(tensor.shape) for tensor in state.values()) == total
    assert not [name for name in state if "running" in name]  # nothing that averages badly


def test_a_state_dict_has_the_names_and_order_of_torchvision() -> None:
    plain = resnet18(num_classes=7, norm_layer=lambda width: nn.GroupNorm(32, width))
    names = list(shapes("resnet18-gn", 7))
    assert names == list(plain.state_dict())
    assert shapes("resnet18-gn", 7)["conv1.weight"].shape == (64, 3, 3, 3)
    blocks = {name.split(".", 1)[1] for name in names if name.startswith("layer2")}
    small = list(shapes("resnet20-gn", 7))
    assert {name.split(".", 1)[1] for name in small if name.startswith("layer2.")} >= blocks
    assert [name for name in small if not name.startswith("layer")] == [
        name for name in names if not name.startswith("layer")
    ]


@pytest.mark.parametrize(("size", "last"), [(32, 4), (64, 8)])
def test_no_pixel_is_pooled_away_before_the_first_block(size: int, last: int) -> None:
    model = create_model(config(), 7).eval()
    seen: dict[str, tuple[int, ...]] = {}
    for name in ("layer1", "layer4"):
        module = model.get_submodule(name)
        module.register_forward_hook(
            lambda _, __, out, name=name: seen.__setitem__(name, tuple(out.shape))
        )
    with torch.no_grad():
        assert model(torch.rand(2, 3, size, size)).shape == (2, 7)
    assert seen == {"layer1": (2, 64, size, size), "layer4": (2, 512, last, last)}


def test_the_small_model_halves_its_maps_twice_and_normalises_in_eight_groups() -> None:
    model = create_model(config("resnet20-gn"), 7)
    sizes = []
    for stage in (1, 2, 3):
        model.get_submodule(f"layer{stage}").register_forward_hook(
            lambda _, __, out: sizes.append(tuple(out.shape[1:]))
        )
    with torch.no_grad():
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert sizes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 21 and {norm.num_groups for norm in norms} == {8}
    weight = model.get_parameter("layer3.1.conv2.weight").detach()
    assert weight.std() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)


def test_values_come_from_the_seed_alone_and_trust_no_memory() -> None:
    before = torch.random.get_rng_state()
    first = create_model(config(), 7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(17)
    again = create_model(config(), 7).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = create_model(config(seed=2), 7).state_dict()
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])
    # He et al. (arXiv:1502.01852): variance 2 / fan_out
    assert first["conv1.weight"].std() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)


def test_a_frozen_head_is_the_fc_layer() -> None:
    model = create_model(config(head="frozen-orthogonal"), 7)
    weight = model.get_parameter("fc.weight")
    assert (weight @ weight.T - torch.eye(7)).abs().max() < 1e-5
    state = model.state_dict()
    selection = Selection.build("head", state)
    assert list(selection.active_shapes()) == ["fc.weight", "fc.bias"]


def test_pictures_of_64_pixels_stay_as_they_are() -> None:
    assert model_spec(config()).image_size == 32
    assert model_spec(config(dataset="tinyimagenet")).image_size == 64
    assert model_spec(config(dataset="tinyimagenet", image_size=32)).image_size == 32
    with pytest.raises(ConfigError, match="image-size of resnet18-gn must be >= 8, got 7"):
        create_model(config(image_size=7), 7)


def test_there_is_nothing_pretrained_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    one = config(weights="auto", cache_dir=str(tmp_path))
    assert one.resolved_weights == "pretrained"
    with pytest.raises(ConfigError, match="resnet18-gn has no weights on the hub; train some with"):
        prepare(one)
    with pytest.raises(ConfigError, match="`fedfrozen pretrain` and give them as weights=FILE"):
        load_weights(nn.Linear(1, 1), "pretrained", one)


def test_a_model_without_attention_has_no_kernel_to_freeze(tmp_path: Path) -> None:
    keys = {"cache_dir": str(tmp_path), "warmup_rounds": 1, "max_train_examples": 67}
    with pytest.raises(ConfigError, match="found no query or key.*without attention takes frozen="):
        prepare(config(strategy="fedfrozen", **keys))


def test_weights_survive_a_file_and_a_head_for_other_classes_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "saved.pth"
    saved = create_model(config(seed=2), 7)
    torch.save(saved.state_dict(), path)
    same = create_model(config(seed=3), 7)
    load_weights(same, str(path), config(seed=3))
    assert all(torch.equal(t, same.state_dict()[name]) for name, t in saved.state_dict().items())
    other = create_model(config(seed=3), 11)
    load_weights(other, str(path), config(seed=3))
    fresh = create_model(config(seed=3), 11).state_dict()
    assert torch.equal(other.state_dict()["fc.weight"], fresh["fc.weight"])
    assert torch.equal(other.state_dict()["conv1.weight"], saved.state_dict()["conv1.weight"])


def test_a_federated_round_trains_all_but_the_frozen_head(tmp_path: Path) -> None:
    one = config(
        cache_dir=str(tmp_path / "cache"),
        run_dir=str(tmp_path / "runs"),
        image_size=8,
        num_clients=2,
        rounds=1,
        local_steps=1,
        batch_size=5,
        max_train_examples=23,
        max_test_examples=13,
        head="frozen-orthogonal",
        threads=1,
    )
    with LocalGrid("fedfrozen_app.client_app:app", 2, one.to_mapping()) as grid:
        folder = run_federation(one, grid, lambda metrics: None)
    start = create_model(one, 10).state_dict()
    final = safetensors.torch.load_file(folder.path / "model.safetensors")
    still = [name for name in final if torch.equal(final[name], start[name])]
    assert sorted(still) == ["fc.bias", "fc.weight"]
    body = sum(t.numel() for name, t in final.items() if name not in still)
    assert folder.metrics()[1].bytes_up == 2 * 4 * body
