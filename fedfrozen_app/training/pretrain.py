"""Base weights where no pretrained ones exist: short central training on the public share.

The public share is the part of the training data that no client holds (``public-fraction``).
The recipe is fixed, so that runs which differ only in their federation start alike:
AdamW, learning rate 1e-3, weight decay 0.01, batches of 32, 20 passes, fp32, with the
preprocessing, augmentation and head of the run: a frozen head is frozen here too.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data.cache import cache_root, cached, content_key
from fedfrozen_app.data.datasets import Dataset
from fedfrozen_app.data.partition import Partition
from fedfrozen_app.models.freeze import freeze_, unfreeze_
from fedfrozen_app.models.head import METADATA_KEY, central_selection
from fedfrozen_app.models.registry import create_model, model_spec
from fedfrozen_app.tensor_file import write_tensors
from fedfrozen_app.training.local import LocalTraining, resolve_device, train

logger = logging.getLogger(__name__)

RECIPE = LocalTraining(
    epochs=20, batch_size=32, optimizer="adamw", lr=1e-3, weight_decay=0.01, precision="fp32"
)
# Raise it when a change elsewhere (initial values, batch order) changes what the recipe gives.
RECIPE_VERSION = 1
# Federated rounds start at 1 and partitions at 0, so no client shares this random stream.
BASE_ROUND, PUBLIC_PARTITION = 0, -1
FILENAME = "model.safetensors"


def base_weights(config: RunConfig, dataset: Dataset, partition: Partition) -> Path:
    """Return a safetensors file of base weights, trained now unless the cache has them.

    The file holds the whole model, head included, for ``load_weights``. It is kept under
    ``cache_root(config) / "base"`` by a key of everything its bits depend on, and its SHA-256
    is checked each time; a damaged one is trained again.

    Raises
    ------
    ConfigError
        When the public share is empty, or the cache cannot be written.
    """
    if len(partition.public) == 0:
        raise ConfigError(
            "weights=base is trained on the public data and there is none; raise "
            f"public-fraction (now {config.resolved_public_fraction}) or use weights=none"
        )
    device = resolve_device(config.device)
    folder = cache_root(config) / "base" / _key(config, dataset, partition, device)

    def build(entry: Path) -> Mapping[str, Any]:
        return _train_base(config, dataset, partition, device, entry / FILENAME)

    meta = cached(folder, build)
    if _sha256(folder / FILENAME) != meta["sha256"]:
        logger.warning("base weights %s are damaged; training them again", folder)
        shutil.rmtree(folder)
        cached(folder, build)
    return folder / FILENAME


def _key(config: RunConfig, dataset: Dataset, partition: Partition, device: torch.device) -> str:
    """Name everything that the weights' bits depend on, down to the order of summation."""
    return content_key(
        version=RECIPE_VERSION,
        recipe=asdict(RECIPE),
        dataset=dataset.key,
        augment=dataset.augment,
        public=hashlib.sha256(partition.public.astype("<i8").tobytes()).hexdigest(),
        model=asdict(model_spec(config)),
        num_classes=dataset.num_outputs,
        seed=config.seed,
        head=config.head,
        device=f"{torch.get_num_threads()} threads" if device.type == "cpu" else device.type,
        torch=torch.__version__,
    )


def _train_base(
    config: RunConfig, dataset: Dataset, partition: Partition, device: torch.device, path: Path
) -> dict[str, Any]:
    public = dataset.examples("train", partition.public, model_spec(config), device)
    model = create_model(config, dataset.num_outputs).to(device)
    freeze_(model, central_selection(config, model))
    result = train(
        model,
        public,
        RECIPE,
        seed=config.seed,
        server_round=BASE_ROUND,
        partition_id=PUBLIC_PARTITION,
    )
    logger.info(
        "base weights: %d public examples, %d steps, training loss %.3f, %.1f s",
        *(result.num_examples, result.steps, result.train_loss, result.seconds),
    )
    unfreeze_(model)
    write_tensors(path, model.state_dict(), {METADATA_KEY: config.head})
    return {"sha256": _sha256(path), **asdict(result)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
