"""The frozen block by digest: content-addressed files that any process can share.

Flower may run every message in a new process, so a client keeps the block it was sent on
disk, named by the SHA-256 of its content. A file is verified each time it is read: a
damaged one is removed and counts as missing, and the server then sends the block again.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path

import safetensors.torch
import torch
from flwr.supercore import log
from safetensors import SafetensorError

from fedfrozen_app.tensor_file import write_tensors

DEFAULT_CAPACITY_BYTES = 8 * 2**30
STALE_SECONDS = 24 * 3600.0


def user_cache() -> Path:
    """Return the absolute folder of all caches in the user's cache folder."""
    # The XDG specification says that a relative value is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "fedfrozen"


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (hex) over names, dtypes, shapes and values, in name order."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


class FrozenCache:
    """Frozen blocks as safetensors files under one folder, the oldest removed when full.

    Parameters
    ----------
    folder : Path
        Created when the first block is stored.
    capacity_bytes : int
        Upper bound of all files together; the block just stored is never removed.
    """

    def __init__(self, folder: Path, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes

    def path(self, key: str) -> Path:
        """Return where the block of a digest lies.

        Raises
        ------
        ValueError
            If ``key`` is not a SHA-256 in hex: a name from the network never becomes a path.
        """
        if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
            raise ValueError(f"a frozen block's digest is 64 hex digits, got {key[:80]!r}")
        return self.folder / f"{key}.safetensors"

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """Return the block of a digest, or None if it is missing or damaged."""
        path = self.path(key)
        try:
            tensors = safetensors.torch.load_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (SafetensorError, OSError):
            tensors = {}
        if digest(tensors) != key:
            with contextlib.suppress(OSError):  # what cannot be removed is noticed again
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # a read-only cache still serves
            os.utime(path)
        return tensors

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store a block whose digest the caller has verified; atomic, any number of writers.

        A folder that is full or read-only is a warning: the block is sent again when needed.
        """
        path = self.path(key)
        if path.exists():
            return
        try:
            self._write(path, tensors)
            self._evict(keep=path)
        except OSError as error:
            log(WARNING, "the frozen block is not kept, so it must be sent again: %s", error)

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
        os.close(handle)
        try:
            write_tensors(Path(name), tensors)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _evict(self, keep: Path) -> None:
        """Remove the blocks used longest ago until the rest fits."""
        for stale in self.folder.glob(".writing-*"):  # left by processes that were killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - stale.stat().st_mtime > STALE_SECONDS:
                    stale.unlink()
        entries = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                entries.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.capacity_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
