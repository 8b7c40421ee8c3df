"""Fill a model from the Hugging Face hub or a file, by timm's own conversions."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models import load_state_dict
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from fedfrozen_app.config import DIGITS_MODEL, NAMED_WEIGHTS, ConfigError, RunConfig
from fedfrozen_app.config_rules import LANGUAGE_MODELS
from fedfrozen_app.models.head import METADATA_KEY, TRAINABLE, draw_head_
from fedfrozen_app.models.registry import OWN_MODELS, model_spec, pretrained_cfg
from fedfrozen_app.tensor_file import read_metadata

logger = logging.getLogger(__name__)

HUB_FILENAME = "model.safetensors"
SHOWN_KEYS = 3
# First components of a classifier's names; a file's own is left out where its shape differs.
# A language model's head is its token embedding, too, and belongs to one vocabulary.
CLASSIFIERS = ("head", "head_dist", "fc")


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


def _hub_id(name: str) -> str:
    hub_id = None if name in OWN_MODELS else pretrained_cfg(name).hf_hub_id
    if not hub_id:
        raise ConfigError(
            f"weights=pretrained: {name} has no weights on the hub; train some with `fedfrozen "
            "pretrain` and give them as weights=FILE (safetensors), or use weights=base or "
            "weights=none"
        )
    return str(hub_id)


def _from_hub(name: str) -> dict[str, Tensor]:
    hub_id = _hub_id(name)
    filename = pretrained_cfg(name).hf_hub_filename or HUB_FILENAME
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


def check_weights(config: RunConfig) -> None:
    """Raise ConfigError if the run's weights cannot exist; nothing is read or downloaded."""
    source = config.resolved_weights
    check_source(source)
    if source == "pretrained":
        _hub_id(model_spec(config).name)


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
    if name in OWN_MODELS and name != DIGITS_MODEL:
        return lambda state_dict, model: state_dict
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
    classifiers = () if name in LANGUAGE_MODELS else CLASSIFIERS
    head = {key for key in own if key.split(".")[0] in classifiers}
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
