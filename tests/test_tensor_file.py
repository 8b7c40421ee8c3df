import errno
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from fedfrozen_app.tensor_file import read_metadata, write_tensors


def test_views_are_stored_as_they_look(tmp_path: Path) -> None:
    whole = torch.arange(1000.0).reshape(100, 10)
    write_tensors(tmp_path / "a", {"rows": whole[:3], "columns": whole[:, :2]})
    back = safetensors.torch.load_file(tmp_path / "a")
    assert torch.equal(back["rows"], whole[:3]) and torch.equal(back["columns"], whole[:, :2])
    assert (tmp_path / "a").stat().st_size < 1200


def test_metadata_stands_beside_the_formats_own_entry(tmp_path: Path) -> None:
    write_tensors(tmp_path / "plain", {"w": torch.zeros(3)})
    write_tensors(tmp_path / "more", {"w": torch.zeros(3)}, {"selection": "é"})
    with safe_open(tmp_path / "plain", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    with safe_open(tmp_path / "more", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "selection": "é"}


def test_an_error_of_the_library_keeps_the_systems_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_tensors(tmp_path / "a", {"w": torch.zeros(3)})
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_that_does_not_exist_is_an_ordinary_error(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        write_tensors(tmp_path / "none" / "a", {"w": torch.zeros(3)})
    assert caught.value.errno == errno.ENOENT


def test_equal_tensors_and_metadata_give_equal_files(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(7.0), "a": torch.zeros(3, 2, dtype=torch.int64)}
    metadata = {f"key-{i}": "ein schöner Wert" for i in range(11)}
    files = []
    for number in range(5):
        path = tmp_path / f"{number}.safetensors"
        write_tensors(path, tensors, metadata)
        files.append(path.read_bytes())
    assert len(set(files)) == 1
    assert read_metadata(tmp_path / "0.safetensors") == {**metadata, "format": "pt"}
    loaded = safetensors.torch.load_file(tmp_path / "0.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "no.safetensors").write_bytes(b"none")
    assert read_metadata(tmp_path / "no.safetensors") == {}
