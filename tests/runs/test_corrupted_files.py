"""Claims about files that are broken in any way: never loaded as if they were whole."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedfrozen_app.runs.checkpoint import read_checkpoint, write_checkpoint
from fedfrozen_app.transport.frozen_cache import FrozenCache, digest

Harm = Callable[[Path, random.Random], None]


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(1 + rng.randrange(100)))


def blank(path: Path, rng: random.Random) -> None:
    """Zeros from some page on, as a crash without a flush leaves them."""
    start = rng.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:start] + bytes(path.stat().st_size - start))


def noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(1 + rng.randrange(3000)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


HARMS: list[Harm] = [flip, flip, flip, cut, lengthen, blank, noise, remove]


def state(server_round: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(server_round)
    return {"model": {"w": torch.randn(7, 11, generator=generator)}, "spent": {1: server_round}}


def write(folder: Path, server_round: int) -> None:
    def make(clients: Path) -> dict[str, object]:
        (clients / "5").mkdir(parents=True)
        (clients / "5" / "control.safetensors").write_bytes(bytes([server_round]) * 301)
        (clients / "seen.json").write_text(json.dumps({"round": server_round}))
        return state(server_round)

    write_checkpoint(folder, server_round, make)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_checkpoints(root: Path, times: int, seed: int) -> None:
    whole, rng = root / "whole", random.Random(seed)
    whole.mkdir()
    for server_round in (3, 4):
        write(whole, server_round)
    good = content(whole / "checkpoint" / "4")
    used = []
    for _ in range(times):
        folder = root / "harmed"
        shutil.copytree(whole, folder)
        last = folder / "checkpoint" / "4"
        path = last / rng.choice(sorted(good))
        if rng.random() < 0.1:  # a file of the checkpoint before in place of its own
            shutil.copy(folder / "checkpoint" / "3" / path.relative_to(last), path)
        else:
            rng.choice(HARMS)(path, rng)
        found = read_checkpoint(folder)
        assert found is not None and found.clients is not None
        used.append(found.server_round)
        # all of one checkpoint or all of the other, never a mixture
        assert found.server_round == 3 or content(last) == good, path
        expected = state(found.server_round)
        assert found.state["spent"] == expected["spent"]
        assert torch.equal(found.state["model"]["w"], expected["model"]["w"])  # type: ignore[index]
        mark = (found.clients / "5" / "control.safetensors").read_bytes()
        assert mark == bytes([found.server_round]) * 301
        shutil.rmtree(folder)
    assert used.count(3) >= 0.95 * times


def check_cache(root: Path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    block = {
        "qkv": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
        "n": torch.ones(3),
    }
    key, cache = digest(block), FrozenCache(root / "cache")
    refused = 0
    for _ in range(times):
        cache.put(key, block)
        path = cache.path(key)
        before = path.read_bytes()
        rng.choice(HARMS)(path, rng)
        found = cache.get(key)
        if found is None:
            refused += 1
            assert not path.exists()
            continue
        # what does not change a tensor, such as a space more, may be read
        assert digest(found) == key and path.read_bytes() != before
    assert refused >= 0.9 * times


def test_a_harmed_checkpoint_gives_the_one_before_and_nothing_between(tmp_path: Path) -> None:
    check_checkpoints(tmp_path, 60, seed=1)


def test_a_harmed_block_is_never_used(tmp_path: Path) -> None:
    check_cache(tmp_path, 60, seed=1)


@pytest.mark.slow
def test_a_thousand_harmed_files_are_never_loaded_as_whole_ones(tmp_path: Path) -> None:
    check_checkpoints(tmp_path, 700, seed=2)
    check_cache(tmp_path, 700, seed=2)
