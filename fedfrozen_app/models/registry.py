"""Models by name: timm Vision Transformers, ResNets with GroupNorm, and a small GPT.

``model_spec`` says what a model eats, ``create_model`` builds it with seeded values and
:func:`fedfrozen_app.models.weights.load_weights` fills it. An image model is a plain timm or
torchvision module: its state dict loads with ``strict=True`` into the same model built there.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import PretrainedCfg
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedfrozen_app.config import DIGITS_MODEL, ConfigError, RunConfig
from fedfrozen_app.config_rules import LANGUAGE_MODELS
from fedfrozen_app.models.head import draw_head_
from fedfrozen_app.models.resnet import BUILDERS, IMAGE_SIZE, check_image_size, create_resnet
from fedfrozen_app.models.tinygpt import SIZES, TinyGPT
from fedfrozen_app.seeds import derive_seed

# The paper's two models (arXiv:2605.06446), with the weights that were pretrained on
# ImageNet-21k and fine-tuned on ImageNet-1k at 224 px (AugReg, arXiv:2106.10270).
ALIASES = {
    "vit-b-32": "vit_base_patch32_224.augreg_in21k_ft_in1k",
    "vit-s-16": "vit_small_patch16_224.augreg_in21k_ft_in1k",
}
RESNETS = tuple(BUILDERS)
OWN_MODELS = (DIGITS_MODEL, *RESNETS, *SIZES)  # by names of our own, without weights on the hub
# Sides of data sets whose pictures a model without a size of its own takes as they are.
NATIVE_SIZES = {"tinyimagenet": 64}
# vit-digits in full: VisionTransformer(**VIT_DIGITS, num_classes=10) is the same model.
VIT_DIGITS: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 2,
    "in_chans": 3,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 4,
    "class_token": False,
    "global_pool": "avg",
}
# timm starts position embeddings at std 0.02. At width 64, without pretraining, patches
# would then look alike wherever they are and the model hardly learns from a few hundred images.
VIT_DIGITS_POSITION_STD = 0.3
# timm's modules whose models are VisionTransformer (RADIO resamples positions its own way).
VIT_MODULES = ("vision_transformer", "deit")


@dataclass(frozen=True)
class ModelSpec:
    """What a model eats: images, or tokens where ``context_length`` is not 0.

    ``image_size`` is the side in pixels; ``mean`` and ``std`` (one per channel) normalise
    pixels in [0, 1]. ``context_length`` is the number of tokens in a block.
    """

    name: str
    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    context_length: int = 0


def model_spec(config: RunConfig) -> ModelSpec:
    """Return the facts that preprocessing needs, without building the model.

    ``name`` is the full timm name, ``architecture.tag``, or one of :data:`OWN_MODELS`.

    Raises
    ------
    ConfigError
        For a name that no model here has; it names the nearest ones.
    """
    name = _resolve_name(config.resolved_model)
    if name in LANGUAGE_MODELS:
        return ModelSpec(name, 0, 0, (), (), config.context_length)
    if name == DIGITS_MODEL:
        size, channels = VIT_DIGITS["img_size"], VIT_DIGITS["in_chans"]
        mean = std = (0.5,) * channels
    elif name in RESNETS:
        size, channels = NATIVE_SIZES.get(config.dataset, IMAGE_SIZE), 3
        mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    else:
        known = pretrained_cfg(name)
        channels, size, _ = known.input_size
        mean, std = tuple(known.mean), tuple(known.std)
    return ModelSpec(name, config.image_size or size, channels, mean, std)


def create_model(config: RunConfig, num_outputs: int, *, init: bool = True) -> nn.Module:
    """Build the model on the CPU with a head of ``num_outputs`` outputs: classes, or tokens.

    Values depend on ``config.seed`` alone and the global generator is left as it was. A ViT is
    built without storage and filled once, which is three times as fast as
    ``timm.create_model`` for ViT-B. With ``init=False`` nothing is filled either: every value
    is undefined until a full state dict is loaded.

    Raises
    ------
    ConfigError
        For an unknown name, an image size that does not fit, or fewer than one output.
    """
    spec = model_spec(config)
    if num_outputs < 1:
        raise ConfigError(
            f"num_classes must be >= 1, got {num_outputs}; use a data set with class labels"
        )
    if spec.name in RESNETS:
        check_image_size(spec.name, spec.image_size)
        model = _seeded(lambda: create_resnet(spec.name, num_outputs), config.seed, init)
    elif spec.name in SIZES:
        size, length = SIZES[spec.name], spec.context_length
        model = _seeded(lambda: TinyGPT(size, num_outputs, length), config.seed, init)
    else:
        model = _create_vit(config, spec, num_outputs, init)
    if init:
        draw_head_(model, config)
    return model


def _seeded(build: Callable[[], nn.Module], seed: int, init: bool) -> nn.Module:
    """Return a model whose constructor draws its values, with those of a seed or with none."""
    if not init:
        with torch.device("meta"):
            model = build()
        return model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "model-init"))
        return build()


def _create_vit(config: RunConfig, spec: ModelSpec, num_classes: int, init: bool) -> nn.Module:
    sizes: dict[str, Any] = {"img_size": spec.image_size, "num_classes": num_classes}
    with torch.device("meta"):
        if spec.name == DIGITS_MODEL:
            model = VisionTransformer(**(VIT_DIGITS | sizes))
        else:
            model = cast(VisionTransformer, timm.create_model(spec.name, **sizes))
    _check_patches(config, spec, model.patch_embed.patch_size)
    model.to_empty(device="cpu")
    if init:
        _fill(model, spec.name, config.seed)
    return cast(nn.Module, model)


def _resolve_name(model: str) -> str:
    name = ALIASES.get(model, model)
    architectures = _names(pretrained=False)
    if name in OWN_MODELS or name in architectures or name in _names(pretrained=True):
        return name
    known = [*OWN_MODELS, *ALIASES, *architectures]
    near = difflib.get_close_matches(model.partition(".")[0], known, n=3, cutoff=0.5)
    if near and near[0] == model.partition(".")[0]:
        near = timm.list_models(f"{near[0]}.*", pretrained=True)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigError(
        f"model must be one of {', '.join([*OWN_MODELS, *ALIASES])} or a Vision Transformer of "
        f"timm, got {model!r}; {hint}timm.list_models(module='vision_transformer') lists them"
    )


def _names(pretrained: bool) -> list[str]:
    listed = (timm.list_models(module=module, pretrained=pretrained) for module in VIT_MODULES)
    return [name for names in listed for name in names if "radio" not in name]


def pretrained_cfg(name: str) -> PretrainedCfg:
    """Return what timm knows of a model's pretrained weights."""
    return cast(PretrainedCfg, timm.get_pretrained_cfg(name))


def _check_patches(config: RunConfig, spec: ModelSpec, patch_size: tuple[int, int]) -> None:
    patch = patch_size[0]
    if spec.image_size % patch:
        near = max(1, round(spec.image_size / patch)) * patch
        raise ConfigError(
            f"image-size must be a multiple of the patch size {patch} of {config.resolved_model}, "
            f"got {spec.image_size}; for example image-size={near}"
        )


def _fill(model: Any, name: str, seed: int) -> None:
    """Draw initial values: timm's own scheme, for vit-digits its Xavier scheme (``jax``)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(derive_seed(seed, "model-init"))
        model.init_weights("jax" if name == DIGITS_MODEL else "")
        if name == DIGITS_MODEL:
            nn.init.normal_(model.pos_embed, std=VIT_DIGITS_POSITION_STD)
