"""Content-addressed folders on disk, safe when several processes want one at once.

Flower may run every message in a new process, so whatever is costly to make (decoded
images, partitions) is written once under a key of its content and mapped afterwards.
"""

import errno
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.transport.frozen_cache import user_cache

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
KEY_LENGTH = 32
# Bytes digested at either end of a file: enough to see a damaged header or a tail that was
# never written, and cheap for files of gigabytes.
DIGESTED_END = 64 * 1024


def cache_root(config: RunConfig) -> Path:
    """Return the absolute folder of all caches: ``cache-dir``, else the user's cache folder."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    return user_cache()


def content_key(**parts: Any) -> str:
    """Return the key of JSON-able parts: equal parts, in any order, give equal keys."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def cached(folder: Path, build: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata of ``folder``, building its files first where they are not intact.

    Parameters
    ----------
    folder
        The entry; its name is a key of everything the files depend on.
    build
        Writes the files into the folder it is given and returns JSON-able metadata. It runs
        in at most one process at a time; its files appear in ``folder`` all at once.

    Raises
    ------
    ConfigError
        When the cache folder cannot be written or its disk is full. Other errors of
        ``build`` pass through and leave no entry.
    """
    if (meta := _read_intact(folder)) is not None:
        return meta
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"cache folder {str(folder.parent)!r} cannot be written: {error}; "
            "set cache-dir to a folder you may write to"
        ) from error
    try:
        # Another process may have built the entry while this one waited.
        if (meta := _read_intact(folder)) is not None:
            return meta
        return _build(folder, build)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"no space left for the cache in {str(folder.parent)!r}; "
            "free some or set cache-dir to a folder on a larger disk"
        ) from error
    finally:
        lock.release()


def _build(folder: Path, build: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Build an entry beside its place and move it there; the caller holds the lock."""
    for stale in folder.parent.glob(f".{folder.name}.*"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    if folder.exists():
        logger.warning("cache entry %s is damaged or incomplete; building it again", folder)
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        entry = Path(temporary) / "entry"
        entry.mkdir()
        meta = dict(build(entry))
        files = {path.name: _fingerprint(path) for path in sorted(entry.iterdir())}
        (entry / MANIFEST).write_text(json.dumps({"files": files, "meta": meta}))
        entry.rename(folder)
    return meta


def _read_intact(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of a complete entry whose files are what the manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if _fingerprint(folder / name) != expected:
                return None
        return dict(manifest["meta"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _fingerprint(path: Path) -> list[int | str]:
    """Return a file's size in bytes and a digest of its two ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(DIGESTED_END))
        file.seek(max(0, size - DIGESTED_END))
        digest.update(file.read(DIGESTED_END))
    return [size, digest.hexdigest()]
