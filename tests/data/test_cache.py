import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data import cache

VALUES = np.arange(100_003)


class Builder:
    """Writes one array and counts how often it had to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> dict[str, int]:
        self.calls += 1
        np.save(folder / "values.npy", VALUES)
        return {"answer": 42}


def test_key_depends_on_every_value_and_on_no_order():
    key = cache.content_key(a=1, b=[2, 3])
    assert key == cache.content_key(b=[2, 3], a=1)
    assert len({key, cache.content_key(a=1, b=[3, 2]), cache.content_key(a="1", b=[2, 3])}) == 3


def test_second_call_reads_what_the_first_one_built(tmp_path):
    build, folder = Builder(), tmp_path / "kind" / "key"
    assert cache.cached(folder, build) == {"answer": 42}
    assert cache.cached(folder, build) == {"answer": 42}
    assert build.calls == 1
    assert np.array_equal(np.load(folder / "values.npy"), VALUES)


def truncate(folder: Path) -> None:
    data = (folder / "values.npy").read_bytes()
    (folder / "values.npy").write_bytes(data[:-1])


def damage_header(folder: Path) -> None:
    data = bytearray((folder / "values.npy").read_bytes())
    data[20] ^= 0xFF
    (folder / "values.npy").write_bytes(data)


def zero_tail(folder: Path) -> None:
    data = (folder / "values.npy").read_bytes()
    (folder / "values.npy").write_bytes(data[:-100] + bytes(100))


def remove_file(folder: Path) -> None:
    (folder / "values.npy").unlink()


def cut_manifest(folder: Path) -> None:
    text = (folder / cache.MANIFEST).read_text()
    (folder / cache.MANIFEST).write_text(text[: len(text) // 2])


def foreign_manifest(folder: Path) -> None:
    (folder / cache.MANIFEST).write_text(json.dumps(["not", "ours"]))


def remove_manifest(folder: Path) -> None:
    (folder / cache.MANIFEST).unlink()


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        damage_header,
        zero_tail,
        remove_file,
        cut_manifest,
        foreign_manifest,
        remove_manifest,
    ],
)
def test_damaged_entry_is_built_again(tmp_path, damage, caplog):
    build, folder = Builder(), tmp_path / "key"
    cache.cached(folder, build)
    damage(folder)
    assert cache.cached(folder, build) == {"answer": 42}
    assert build.calls == 2
    assert np.array_equal(np.load(folder / "values.npy"), VALUES)
    assert "damaged" in caplog.text


def test_failed_build_leaves_no_entry_and_no_litter(tmp_path):
    folder = tmp_path / "key"

    def fail(out: Path) -> dict[str, int]:
        (out / "half.npy").write_bytes(b"half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cache.cached(folder, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert cache.cached(folder, Builder()) == {"answer": 42}


def test_litter_of_a_killed_process_is_removed_by_the_next_build(tmp_path):
    (tmp_path / ".key.dead" / "entry").mkdir(parents=True)
    cache.cached(tmp_path / "key", Builder())
    assert not (tmp_path / ".key.dead").exists()


SLOW_BUILD = """
import sys, time
from pathlib import Path
from fedfrozen_app.data.cache import cached

root = Path(sys.argv[1])

def build(out):
    with (root / "built").open("a") as log:
        log.write("x")
    (out / "part").write_text("half")
    time.sleep(0.5)
    (out / "part").write_text("whole")
    return {"answer": 42}

(root / f"ready{sys.argv[2]}").touch()
while len(list(root.glob("ready*"))) < 3:
    time.sleep(0.01)
meta = cached(root / "key", build)
print(meta["answer"], (root / "key" / "part").read_text())
"""


def test_three_processes_at_once_build_one_entry(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_BUILD, str(tmp_path), str(i)],
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert outputs == ["42 whole\n"] * 3
    assert (tmp_path / "built").read_text() == "x"


def test_unwritable_cache_is_an_error_that_names_cache_dir(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written.*set cache-dir"):
        cache.cached(tmp_path / "file" / "images" / "key", Builder())


def test_full_disk_is_an_error_that_names_cache_dir(tmp_path):
    def fill(out: Path) -> dict[str, int]:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="no space left.*cache-dir"):
        cache.cached(tmp_path / "key", fill)


def test_cache_root_is_cache_dir_then_xdg_then_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_root(RunConfig()) == tmp_path / ".cache" / "fedfrozen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root(RunConfig()) == tmp_path / "xdg" / "fedfrozen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_root(RunConfig()) == tmp_path / ".cache" / "fedfrozen"
    assert cache.cache_root(RunConfig(cache_dir="~/mine")) == tmp_path / "mine"
