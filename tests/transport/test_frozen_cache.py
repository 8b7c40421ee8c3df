import os
from pathlib import Path

import pytest
import torch

from fedfrozen_app.transport.frozen_cache import FrozenCache, digest

BLOCK = {"q": torch.arange(15, dtype=torch.float32).reshape(3, 5), "k": torch.ones(7)}


def test_digest_depends_on_names_shapes_dtypes_and_values_but_not_on_order() -> None:
    same = {"k": BLOCK["k"].clone(), "q": BLOCK["q"].clone()}
    others = [
        {"q": BLOCK["q"], "kk": BLOCK["k"]},
        {"q": BLOCK["q"].reshape(5, 3), "k": BLOCK["k"]},
        {"q": BLOCK["q"], "k": BLOCK["k"].double()},
        {"q": BLOCK["q"] + torch.eye(3, 5) * 1e-6, "k": BLOCK["k"]},
        {"q": BLOCK["q"]},
    ]
    assert digest(same) == digest(BLOCK)
    assert len({digest(BLOCK), *map(digest, others)}) == 6


def test_digest_reads_values_not_storage() -> None:
    wide = torch.arange(30, dtype=torch.float32).reshape(3, 10)
    assert digest({"q": wide[:, :5]}) == digest({"q": wide[:, :5].clone()})


def test_what_is_put_comes_back_bit_for_bit(tmp_path: Path) -> None:
    cache, key = FrozenCache(tmp_path / "new"), digest(BLOCK)
    assert cache.get(key) is None
    cache.put(key, BLOCK)
    back = cache.get(key)
    assert back is not None and back.keys() == BLOCK.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in BLOCK.items())
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"{key}.safetensors"]


def test_views_of_one_storage_can_be_put(tmp_path: Path) -> None:
    fused = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    block = {"a": fused[:2], "b": fused[2:4]}
    cache, key = FrozenCache(tmp_path), digest(block)
    cache.put(key, block)
    back = cache.get(key)
    assert back is not None and torch.equal(back["b"], fused[2:4])
    assert cache.path(key).stat().st_size < 250  # not the whole storage twice


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "other"])
def test_a_damaged_file_counts_as_missing_and_is_removed(tmp_path: Path, damage: str) -> None:
    cache, key = FrozenCache(tmp_path), digest(BLOCK)
    cache.put(key, BLOCK)
    path = cache.path(key)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-3] ^= 1
    other = {"x": torch.zeros(2)}
    cache.put(digest(other), other)
    damaged = {
        "flip": bytes(content),
        "truncate": bytes(content[:-5]),
        "empty": b"",
        "other": cache.path(digest(other)).read_bytes(),
    }
    path.write_bytes(damaged[damage])
    assert cache.get(key) is None
    assert not path.exists()
    cache.put(key, BLOCK)
    assert cache.get(key) is not None


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = FrozenCache(tmp_path / "file" / "cache")
    with caplog.at_level("WARNING", logger="flwr"):
        cache.put(digest(BLOCK), BLOCK)
    assert "the frozen block is not kept" in caplog.text
    assert cache.get(digest(BLOCK)) is None


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "G" * 64, "a" * 63, "A" * 64])
def test_only_a_digest_becomes_a_file_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        FrozenCache(tmp_path).get(key)


def test_a_full_cache_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    blocks = [{"w": torch.full((1000,), float(number))} for number in range(4)]
    cache = FrozenCache(tmp_path, capacity_bytes=9_000)  # two files of about 4.1 kB
    keys = [digest(block) for block in blocks]
    for age, (key, block) in enumerate(zip(keys[:3], blocks[:3], strict=True)):
        cache.put(key, block)
        os.utime(cache.path(key), (1000 + age, 1000 + age))
    assert [cache.path(key).exists() for key in keys[:3]] == [False, True, True]
    assert cache.get(keys[1]) is not None  # used now, so the third is older
    cache.put(keys[3], blocks[3])
    assert [cache.path(key).exists() for key in keys] == [False, True, False, True]


def test_a_block_larger_than_the_cache_is_kept_alone(tmp_path: Path) -> None:
    cache, key = FrozenCache(tmp_path, capacity_bytes=10), digest(BLOCK)
    cache.put(key, BLOCK)
    assert cache.get(key) is not None
