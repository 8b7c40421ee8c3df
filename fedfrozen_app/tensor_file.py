"""Safetensors files: written with the errors of ordinary files, and what they say of themselves."""

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict; views are stored as they look, not with all of their storage.

    ``metadata`` is stored in the file's header beside the format's own entry.

    Raises
    ------
    OSError
        When the file cannot be written, for example because the disk is full.
    """
    own = {name: _standing_alone(tensor) for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(own, path, metadata={**(metadata or {}), "format": "pt"})
    except SafetensorError as error:  # the library's word for an I/O error, too
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None
    if metadata:
        _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Put the header's metadata in order: the library leaves that to chance.

    Equal tensors and metadata then give equal files.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # else it was escaped in another way: leave it
            file.seek(8)
            file.write(text.ljust(size))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a file's tensors, which are the caller's own, and its metadata.

    Not by the library's ``safe_open`` (0.8), which loses some 60 bytes for every tensor that it
    gives: that adds up where files are read in every round.

    Raises
    ------
    OSError
        When the file cannot be read.
    ValueError
        When it is damaged.
    """
    content = path.read_bytes()
    try:
        tensors = safetensors.torch.load(content)
        size = int.from_bytes(content[:8], "little")
        return tensors, dict(json.loads(content[8 : 8 + size]).get("__metadata__", {}))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty for a file that is none or has none."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError):
        return {}


def _standing_alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor that owns its whole storage; a copy only if needed."""
    own = tensor.detach().cpu().contiguous()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
