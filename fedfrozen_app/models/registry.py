"""Models by name: timm Vision Transformers, their preprocessing facts and where weights come from.

``model_spec`` says what a model eats, ``create_model`` builds it with seeded values and
``load_weights`` fills it from a hub or a file. Every model is a plain timm module, so its
state dict loads with ``strict=True`` into the same model built by timm alone.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models import PretrainedCfg, load_state_dict
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from fedfrozen_app.config import DIGITS_MODEL, NAMED_WEIGHTS, ConfigError, RunConfig
from fedfrozen_app.models.head import METADATA_KEY, TRAINABLE, draw_head_
from fedfrozen_app.seeds import derive_seed
from fedfrozen_app.tensor_file import read_metadata

logger = logging.getLogger(__name__)

# The paper's two models (arXiv:2605.06446), with the weights that were pretrained on
# ImageNet-21k and fine-tuned on ImageNet-1k at 224 px (AugReg, arXiv:2106.10270).
ALIASES = {
    "vit-b-32": "vit_base_patch32_224.augreg_in21k_ft_in1k",
    "vit-s-16": "vit_small_patch16_224.augreg_in21k_ft_in1k",
}
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
HUB_FILENAME = "model.safetensors"
SHOWN_KEYS = 3


@dataclass(frozen=True)
class ModelSpec:
    """What a model eats.

    ``image_size`` is the side in pixels; ``mean`` and ``std`` (one per channel) normalise
    pixels in [0, 1].
    """

    name: str
    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def model_spec(config: RunConfig) -> ModelSpec:
    """Return the facts that preprocessing needs, without building the model.

    ``name`` is the full timm name, ``architecture.tag``, or ``vit-digits``.

    Raises
    ------
    ConfigError
        For a name that is no Vision Transformer of timm; it names the nearest ones.
    """
    name = _resolve_name(config.resolved_model)
    if name == DIGITS_MODEL:
        size, channels = VIT_DIGITS["img_size"], VIT_DIGITS["in_chans"]
        mean = std = (0.5,) * channels
    else:
        pretrained_cfg = _pretrained_cfg(name)
        channels, size, _ = pretrained_cfg.input_size
        mean, std = tuple(pretrained_cfg.mean), tuple(pretrained_cfg.std)
    return ModelSpec(name, config.image_size or size, channels, mean, std)


def create_model(config: RunConfig, num_classes: int, *, init: bool = True) -> VisionTransformer:
    """Build the model on the CPU with a classification head of ``num_classes`` outputs.

    Values depend on ``config.seed`` alone and the global generator is left as it was. The
    model is built without storage and filled once, which is three times as fast as
    ``timm.create_model`` for ViT-B. With ``init=False`` nothing is filled either: every value
    is undefined until a full state dict is loaded.

    Raises
    ------
    ConfigError
        For an unknown name, an image size that patches do not tile, or fewer than one class.
    """
    spec = model_spec(config)
    if num_classes < 1:
        raise ConfigError(
            f"num_classes must be >= 1, got {num_classes}; use a data set with class labels"
        )
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
        draw_head_(model, config)
    return model


def load_weights(model: nn.Module, source: str, config: RunConfig) -> None:
    """Fill ``model`` in place from ``source``.

    ``none`` keeps the seeded values; ``pretrained`` asks the Hugging Face hub for the model's
    own weights; anything else is a file (safetensors, or a torch checkpoint that
    ``weights_only=True`` can read). Half precision is widened to the model's dtype, position
    and patch embeddings are resampled by timm's own rule, and a classification head of another
    shape is left out, so the seeded head stays. A frozen head is drawn again, unless the file
    says that its own was frozen as this run's is (:mod:`fedfrozen_app.models.head`).

    Raises
    ------
    ConfigError
        When the source cannot be read or does not fit the model.
    """
    if source == "none":
        return
    name = model_spec(config).name
    if source == "pretrained":
        state_dict, origin = _from_hub(name), f"the hub weights of {name}"
    else:
        state_dict, origin = _from_file(source), f"weights file {source!r}"
    try:
        state_dict = _filter(name)(state_dict, model)
    except Exception as error:  # whatever timm's conversion trips over in a foreign file
        raise ConfigError(_does_not_fit(origin, name, [f"cannot be converted: {error}"])) from None
    _load_fitting(model, state_dict, name, origin)
    if config.head != TRAINABLE and not _knows_head(source, config):
        draw_head_(model, config)


def _knows_head(source: str, config: RunConfig) -> bool:
    """Whether a source's weights were trained with the kind of frozen head that the run has."""
    if source == "pretrained":
        return False
    made = read_metadata(Path(source)).get(METADATA_KEY, TRAINABLE)
    if made != config.head:
        logger.warning(
            "weights file %r was trained with head=%s, so the run's head=%s is drawn anew and the "
            "model has yet to adapt to it",
            *(source, made, config.head),
        )
    return made == config.head


def _resolve_name(model: str) -> str:
    name = ALIASES.get(model, model)
    architectures = _names(pretrained=False)
    if name == DIGITS_MODEL or name in architectures or name in _names(pretrained=True):
        return name
    known = [DIGITS_MODEL, *ALIASES, *architectures]
    near = difflib.get_close_matches(model.partition(".")[0], known, n=3, cutoff=0.5)
    if near and near[0] == model.partition(".")[0]:
        near = timm.list_models(f"{near[0]}.*", pretrained=True)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigError(
        f"model must be vit-digits, vit-b-32, vit-s-16 or a Vision Transformer of timm, got "
        f"{model!r}; {hint}timm.list_models(module='vision_transformer') lists them"
    )


def _names(pretrained: bool) -> list[str]:
    listed = (timm.list_models(module=module, pretrained=pretrained) for module in VIT_MODULES)
    return [name for names in listed for name in names if "radio" not in name]


def _pretrained_cfg(name: str) -> PretrainedCfg:
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


def _from_hub(name: str) -> dict[str, Tensor]:
    hub_id = None if name == DIGITS_MODEL else _pretrained_cfg(name).hf_hub_id
    if not hub_id:
        raise ConfigError(
            f"weights=pretrained: {name} has no weights on the hub; use weights=none or "
            "weights=FILE (safetensors)"
        )
    filename = _pretrained_cfg(name).hf_hub_filename or HUB_FILENAME
    try:
        return _from_file(_download(hub_id, filename))
    except Exception as error:  # the hub client raises its own, httpx's and the OS's errors
        raise ConfigError(
            f"weights=pretrained: cannot get {hub_id} from the Hugging Face hub "
            f"({_first_line(error)}); download its {filename} elsewhere and give it as "
            "weights=FILE"
        ) from None


def _download(hub_id: str, filename: str) -> str:
    """Return a cached copy's path without asking the hub, which takes long when offline."""
    try:
        return hf_hub_download(hub_id, filename, local_files_only=True)
    except LocalEntryNotFoundError:
        return hf_hub_download(hub_id, filename)


def check_source(source: str) -> None:
    """Raise ConfigError if ``source`` is neither a known word nor a file."""
    if source not in NAMED_WEIGHTS and not Path(source).is_file():
        raise ConfigError(
            f"weights must be pretrained, base, none or a file, got {source!r}, which does not "
            "exist; give the path of a safetensors file"
        )


def _from_file(source: str) -> dict[str, Tensor]:
    check_source(source)
    path = Path(source)
    try:
        checkpoint = load_state_dict(str(path), weights_only=True)
    except Exception as error:  # corrupt, not a checkpoint, or pickled code: refused
        raise ConfigError(
            f"weights file {source!r} cannot be read ({_first_line(error)}); give a "
            "safetensors file or a torch checkpoint that holds tensors only"
        ) from None
    return {key: value for key, value in checkpoint.items() if isinstance(value, Tensor)}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _filter(name: str) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    """Return timm's checkpoint conversion for ``name`` with the options timm gives it."""
    if name.startswith("deit"):
        return partial(checkpoint_filter_fn, adapt_layer_scale=True)
    if name.startswith("flexi"):
        return partial(checkpoint_filter_fn, interpolation="bilinear", antialias=False)
    return cast(Callable[..., dict[str, Tensor]], checkpoint_filter_fn)


def _load_fitting(
    model: nn.Module, state_dict: Mapping[str, Tensor], name: str, origin: str
) -> None:
    """Load everything but a head of another shape; anything else amiss is an error."""
    own = model.state_dict()
    head = {key for key in own if key.split(".")[0] in ("head", "head_dist")}
    fits = {key for key in head if key in state_dict and state_dict[key].shape == own[key].shape}
    if fits != head:
        # One matching half of a head, say the bias, is no classifier: leave out all of it.
        state_dict = {key: value for key, value in state_dict.items() if key not in head}
        own = {key: value for key, value in own.items() if key not in head}
    mismatching = [
        f"{key} {list(state_dict[key].shape)} instead of {list(value.shape)}"
        for key, value in own.items()
        if key in state_dict and state_dict[key].shape != value.shape
    ]
    problems = [
        _shown("missing", [key for key in own if key not in state_dict]),
        _shown("unexpected", [key for key in state_dict if key not in own]),
        _shown("mismatching", mismatching),
    ]
    if any(problems):
        raise ConfigError(_does_not_fit(origin, name, [text for text in problems if text]))
    broken = [key for key in own if not torch.isfinite(state_dict[key]).all()]
    if broken:
        raise ConfigError(
            f"{origin} has non-finite values, first in {broken[0]!r}; use another file"
        )
    model.load_state_dict(state_dict, strict=False)


def _shown(kind: str, keys: list[str]) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return f"{kind}: {', '.join(keys[:SHOWN_KEYS])}{more}"


def _does_not_fit(origin: str, name: str, problems: list[str]) -> str:
    return (
        f"{origin} does not fit model {name}; {'; '.join(problems)}. Use weights made for this "
        "model, or set model to the one they were made for"
    )
