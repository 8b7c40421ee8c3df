import errno
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from fedfrozen_app.transport import client_files
from fedfrozen_app.transport.client_state import LIMIT_BYTES, ClientState, Kept, forget

RUN, OTHER = "0123456789abcdef" * 2, "f" * 32
SELECTION = "value:3,5;é"
DAY = 24 * 3600


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "w": torch.full((3, 5), float(value)),
        "b": torch.arange(7, dtype=torch.float64) * value,
        "steps": torch.tensor(11),
        "none": torch.zeros(0, 2),
    }


def same(kept: Kept | None, value: float, selection: str = SELECTION) -> bool:
    expected = tensors(value)
    return (
        kept is not None
        and kept.selection == selection
        and kept.tensors.keys() == expected.keys()
        and all(kept.tensors[name].dtype == tensor.dtype for name, tensor in expected.items())
        and all(torch.equal(kept.tensors[name], tensor) for name, tensor in expected.items())
    )


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def stored(state: RecordDict) -> list[str]:
    return sorted(key for key in state if key.startswith("fedfrozen."))


class Node:
    """One client's place: a state and a folder, opened anew for every message."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.state, self.folder, self.limit_bytes = RecordDict(), folder, limit_bytes

    def open(self, run: str = RUN, partition_id: int = 13) -> ClientState:
        return ClientState(
            self.state, self.folder, run, partition_id, "control", limit_bytes=self.limit_bytes
        )

    def put(self, version: int, accepted: int) -> None:
        self.open().put(version, accepted, tensors(version), SELECTION)

    def versions(self) -> list[int]:
        """Return the rounds whose versions come back, with the values of that round."""
        return [number for number in range(20) if same(self.open().get(number), number)]

    def any_rounds(self) -> list[int]:
        return [number for number in range(20) if self.open().get(number) is not None]


@pytest.fixture(params=[LIMIT_BYTES, 0], ids=["state", "files"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    return Node(tmp_path / "cache" / "client-state", request.param)


# --- the versions -------------------------------------------------------------------------


def test_a_version_comes_back_by_its_round_and_no_other(node: Node) -> None:
    assert node.any_rounds() == []
    node.put(3, 0)
    assert node.versions() == node.any_rounds() == [3]
    in_state = node.limit_bytes > 0
    assert files(node.folder) == ([] if in_state else [f"{RUN}/13/control-3.safetensors"])
    kept = ["fedfrozen.control.version-3", "fedfrozen.control.versions"]
    assert stored(node.state) == (kept if in_state else [])


def test_the_accepted_version_and_the_last_one_stay(node: Node) -> None:
    node.put(1, 0)
    node.put(2, 1)
    assert node.versions() == [1, 2]
    node.put(5, 2)
    assert node.versions() == node.any_rounds() == [2, 5]


def test_a_version_that_the_server_never_used_is_replaced(node: Node) -> None:
    node.put(2, 0)
    node.put(4, 2)
    node.put(7, 2)  # the reply of round 4 was lost
    assert node.versions() == node.any_rounds() == [2, 7]


def test_versions_of_a_future_that_was_rolled_back_are_removed(node: Node) -> None:
    node.put(4, 0)
    node.put(9, 4)
    node.put(6, 4)  # the server went back to its checkpoint of round 5
    assert node.versions() == node.any_rounds() == [4, 6]
    node.put(2, 1)  # and to one older than all that is kept
    assert node.versions() == node.any_rounds() == [2]


def test_a_round_that_is_repeated_replaces_its_version(node: Node) -> None:
    node.put(3, 0)
    node.open().put(3, 0, tensors(17.0), "all")
    assert same(node.open().get(3), 17.0, "all")
    assert node.any_rounds() == [3]


def test_the_newest_version_before_the_accepted_one_stays_if_that_one_is_lost(node: Node) -> None:
    node.put(2, 0)
    node.put(8, 5)
    assert node.versions() == node.any_rounds() == [2, 8]


def test_each_version_has_its_own_selection(node: Node) -> None:
    node.open().put(1, 0, tensors(1), "all")
    node.open().put(2, 1, tensors(2), "value")
    assert same(node.open().get(1), 1, "all") and same(node.open().get(2), 2, "value")


@pytest.mark.parametrize(("version", "accepted"), [(0, 0), (3, 3), (3, 4), (3, -1)])
def test_a_reply_is_accepted_only_before_the_next_round(
    node: Node, version: int, accepted: int
) -> None:
    with pytest.raises(ValueError, match="0 <= accepted < version"):
        node.put(version, accepted)
    assert stored(node.state) == files(node.folder) == []


def test_two_names_do_not_meet(node: Node) -> None:
    node.put(1, 0)
    for name in ("control2", "contro"):
        other = ClientState(node.state, node.folder, RUN, 13, name, limit_bytes=node.limit_bytes)
        assert other.get(1) is None
        other.put(3, 1, tensors(5), "all")
        assert same(other.get(3), 5, "all")
    assert node.versions() == node.any_rounds() == [1]
    node.put(8, 5)  # its newest version up to round 5 is that of round 1
    assert node.versions() == node.any_rounds() == [1, 8]


def test_what_another_run_left_is_not_found(node: Node) -> None:
    node.put(1, 0)
    other = node.open(run=OTHER)
    assert other.get(1) is None
    assert stored(node.state) == []  # the node's state belongs to the run that goes on
    other.put(1, 0, tensors(2), SELECTION)
    assert same(node.open(run=OTHER).get(1), 2)


def test_another_partition_is_not_found(node: Node) -> None:
    node.put(1, 0)
    assert node.open(partition_id=11).get(1) is None


# --- the two places -----------------------------------------------------------------------


def test_the_limit_counts_all_tensors_together(tmp_path: Path) -> None:
    nbytes = 15 * 4 + 7 * 8 + 8  # what `tensors` returns
    Node(tmp_path / "a", nbytes).put(1, 0)
    assert files(tmp_path) == []
    Node(tmp_path / "b", nbytes - 1).put(1, 0)
    assert files(tmp_path) == [f"b/{RUN}/13/control-1.safetensors"]


def test_a_state_that_grows_and_shrinks_leaves_no_version_behind(tmp_path: Path) -> None:
    node = Node(tmp_path, LIMIT_BYTES)
    for version in range(1, 12):  # in turn: two in `state`, three in files
        node.limit_bytes = LIMIT_BYTES if version % 5 < 2 else 0
        node.put(version, version - 1)
        expected = [number for number in (version - 1, version) if number]
        assert node.versions() == expected
        in_files = [number for number in expected if number % 5 >= 2]
        paths = [f"{RUN}/13/control-{number}.safetensors" for number in in_files]
        assert files(tmp_path) == sorted(paths)
        arrays = sum(isinstance(value, ArrayRecord) for value in node.state.values())
        assert arrays == len(expected) - len(in_files)
        assert len(node.state) == (arrays + 1 if arrays else 0)


@pytest.mark.parametrize("limits", [(LIMIT_BYTES, 0), (0, LIMIT_BYTES)])
def test_a_round_repeated_in_the_other_place_counts_once(
    tmp_path: Path, limits: tuple[int, int]
) -> None:
    node = Node(tmp_path, limits[0])
    node.put(3, 0)
    node.limit_bytes = limits[1]
    node.open().put(3, 0, tensors(17.0), SELECTION)
    assert same(node.open().get(3), 17.0)
    assert len(files(tmp_path)) + len(stored(node.state)) // 2 == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_dtype_that_numpy_lacks_goes_into_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    node = Node(tmp_path, LIMIT_BYTES)
    values = torch.linspace(-2, 2, 11).to(dtype)
    node.open().put(1, 0, {"w": values}, "all")
    assert files(tmp_path) == [f"{RUN}/13/control-1.safetensors"] and stored(node.state) == []
    kept = node.open().get(1)
    assert kept is not None and kept.tensors["w"].dtype == dtype
    assert torch.equal(kept.tensors["w"].view(torch.uint8), values.view(torch.uint8))


def test_a_node_of_several_partitions_uses_files_and_leaves_the_state_alone(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, LIMIT_BYTES)
    node.put(1, 0)
    before = stored(node.state)
    for partition_id in (2, 3):
        client = ClientState(node.state, tmp_path, OTHER, partition_id, "control", own_node=False)
        client.put(1, 0, tensors(partition_id), SELECTION)
    for partition_id in (2, 3):
        client = ClientState(node.state, tmp_path, OTHER, partition_id, "control", own_node=False)
        assert same(client.get(1), partition_id)
    assert stored(node.state) == before
    assert files(tmp_path) == [f"{OTHER}/{number}/control-1.safetensors" for number in (2, 3)]


def work(folder: Path, partition_id: int) -> None:
    for version in range(1, 18):
        client = ClientState(
            RecordDict(), folder, RUN, partition_id, "control", own_node=False, limit_bytes=0
        )
        before = client.get(version - 1)
        assert version == 1 or same(before, partition_id * 100 + version - 1)
        value = partition_id * 100 + version
        client.put(version, version - 1, tensors(value), SELECTION)


def test_partitions_of_one_node_at_work_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, [tmp_path] * 3, [1, 2, 3]))
    assert len(files(tmp_path)) == 6


# --- the node's state ---------------------------------------------------------------------


def test_a_users_own_records_are_never_touched(node: Node) -> None:
    own = {
        "control": ConfigRecord({"run": "mine"}),
        "fedfrozen": MetricRecord({"loss": 0.5}),
        "fedfrozen.controls": MetricRecord({"loss": 0.25}),
        "xfedfrozen.control.versions": ConfigRecord({"numbers": [1]}),
    }
    node.state.update(own)
    node.put(1, 0)
    node.put(2, 1)
    node.put(1, 0)
    node.open(run=OTHER).put(3, 0, tensors(3), "all")
    node.open(run=RUN)
    assert {key: value for key, value in node.state.items() if key in own} == own
    assert sorted(node.state) == sorted(own)


def through_pickle(state: RecordDict) -> RecordDict:
    back = pickle.loads(pickle.dumps(state, protocol=5))
    assert isinstance(back, RecordDict)
    return back


def through_the_wire(state: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(state))


@pytest.mark.parametrize("travel", [through_pickle, through_the_wire])
def test_the_state_survives_the_way_between_processes(
    tmp_path: Path, travel: Callable[[RecordDict], RecordDict]
) -> None:
    node = Node(tmp_path, LIMIT_BYTES)
    for version in range(1, 6):
        node.put(version, version - 1)
        node.state = travel(node.state)
    assert node.versions() == node.any_rounds() == [4, 5]
    assert files(tmp_path) == []


def test_tensors_are_shared_with_the_state_not_copied(tmp_path: Path) -> None:
    node, given = Node(tmp_path, LIMIT_BYTES), torch.ones(3, 5, requires_grad=True)
    node.open().put(1, 0, {"w": given}, "all")
    kept = node.open().get(1)
    assert kept is not None and kept.tensors["w"].data_ptr() == given.data_ptr()
    assert not kept.tensors["w"].requires_grad


@pytest.mark.parametrize("damage", ["record", "kind", "numbers", "about", "orphan"])
def test_damaged_records_count_as_missing_and_are_removed(tmp_path: Path, damage: str) -> None:
    node = Node(tmp_path, LIMIT_BYTES)
    node.put(3, 0)
    about = node.state["fedfrozen.control.versions"]
    assert isinstance(about, ConfigRecord)
    if damage == "record":
        del node.state["fedfrozen.control.version-3"]
    elif damage == "kind":
        node.state["fedfrozen.control.version-3"] = MetricRecord({"loss": 1.0})
    elif damage == "numbers":
        about["numbers"] = 3
    elif damage == "about":
        del node.state["fedfrozen.control.versions"]
    else:
        about["numbers"] = [4]
    assert node.any_rounds() == []
    assert stored(node.state) == []


# --- the files ----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "header", "truncate", "empty", "round", "partition"])
def test_a_damaged_file_counts_as_missing_and_is_removed(tmp_path: Path, damage: str) -> None:
    node = Node(tmp_path, 0)
    node.put(1, 0)
    node.put(2, 1)
    node.open(partition_id=2).put(2, 0, tensors(2), SELECTION)
    path = tmp_path / RUN / "13" / "control-2.safetensors"
    content = bytearray(path.read_bytes())
    flipped = bytearray(content)
    flipped[-3] ^= 1
    path.write_bytes(
        {
            "flip": bytes(flipped),
            "header": content.replace(b"value:3,5", b"value:3,7"),
            "truncate": bytes(content[:-5]),
            "empty": b"",
            "round": path.with_name("control-1.safetensors").read_bytes(),
            "partition": (tmp_path / RUN / "2" / "control-2.safetensors").read_bytes(),
        }[damage]
    )
    assert node.open().get(2) is None
    assert not path.exists()
    assert node.versions() == [1]


@pytest.mark.parametrize(
    "run", ["", "../x", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 32 + "\n", "../" + "a" * 29]
)
def test_only_a_token_becomes_a_folder(tmp_path: Path, run: str) -> None:
    with pytest.raises(ValueError, match="32 lowercase hex digits"):
        ClientState(RecordDict(), tmp_path, run, 0, "control")
    with pytest.raises(ValueError, match="32 lowercase hex digits"):
        forget(tmp_path, run)


@pytest.mark.parametrize("partition_id", [-1, "../x", 1.0, None])
def test_only_a_number_becomes_a_partitions_folder(tmp_path: Path, partition_id: object) -> None:
    with pytest.raises(ValueError, match="partition_id must be an integer >= 0"):
        ClientState(RecordDict(), tmp_path, RUN, partition_id, "control")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "../x", "a.b", "a-1", "A", "a" * 33])
def test_only_an_identifier_becomes_a_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a client state's name"):
        ClientState(RecordDict(), tmp_path, RUN, 0, name)


def test_a_full_disk_is_an_error_that_names_the_place_and_keeps_the_accepted_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, 0)
    node.put(1, 0)

    def full(path: Path, *arguments: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(client_files, "write_tensors", full)
        with pytest.raises(
            OSError, match="version 2 of the client state cannot be kept .No space left"
        ) as caught:
            node.put(2, 1)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / RUN / "13")
    assert str(tmp_path / RUN / "13") in str(caught.value)
    assert node.versions() == node.any_rounds() == [1]
    assert files(tmp_path) == [f"{RUN}/13/control-1.safetensors"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    node = Node(tmp_path / "file" / "states", 0)
    assert node.open().get(1) is None
    with pytest.raises(NotADirectoryError, match="version 1 of the client state cannot be kept"):
        node.put(1, 0)


def test_a_file_that_cannot_be_read_is_an_error_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, 0)
    node.put(1, 0)

    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(client_files, "read_tensors", denied)
        with pytest.raises(PermissionError, match="version 1 of the client state cannot be read"):
            node.open().get(1)
    assert node.versions() == [1]


def test_a_file_that_goes_while_it_is_looked_for_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, opened = Node(tmp_path, 0), client_files.read_tensors
    node.put(1, 0)

    def gone(path: Path) -> object:
        path.unlink()
        return opened(path)

    monkeypatch.setattr(client_files, "read_tensors", gone)
    assert node.open().get(1) is None


def test_a_version_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "content")
        fsync(handle)

    def named(source: object, target: object) -> None:
        done.append("name")
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    Node(tmp_path, 0).put(1, 0)
    assert done == ["content", "name", "folder"]


def test_unfinished_files_of_killed_processes_are_removed_when_old(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    node.put(1, 0)
    old, new = tmp_path / RUN / "13" / ".control-old", tmp_path / RUN / "13" / ".control-new"
    old.write_text("")
    new.write_text("")
    os.utime(old, (time.time() - 2 * DAY,) * 2)
    node.put(2, 1)
    assert not old.exists() and new.exists()
    assert node.versions() == node.any_rounds() == [1, 2]


# --- runs that have ended -----------------------------------------------------------------


def age(folder: Path, days: float) -> None:
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (time.time() - days * DAY,) * 2, follow_symlinks=False)


def test_forget_removes_the_files_of_that_run_only(tmp_path: Path) -> None:
    node = Node(tmp_path, 0)
    forget(tmp_path, RUN)  # nothing there is no error
    forget(tmp_path / "none", RUN)
    node.put(1, 0)
    node.open(run=OTHER).put(1, 0, tensors(1), "all")
    forget(tmp_path, RUN)
    assert [path.name for path in tmp_path.iterdir()] == [OTHER]
    assert node.any_rounds() == []


def test_runs_that_died_are_swept_when_a_file_is_written(tmp_path: Path) -> None:
    dead, alive, nearly = "1" * 32, "2" * 32, "3" * 32
    node = Node(tmp_path, 0)
    for run in (dead, alive, nearly, RUN):
        for partition_id in (1, 2):
            node.open(run=run, partition_id=partition_id).put(1, 0, tensors(1), "all")
    for name in ("notes", "A" * 32):  # not ours
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
        age(tmp_path / name, 100)
    age(tmp_path / dead, 7.1)
    age(tmp_path / nearly, 6.9)
    age(tmp_path / alive, 100)
    os.utime(tmp_path / alive / "2" / "control-1.safetensors")  # one file is enough
    age(tmp_path / RUN, 100)  # its own, resumed late
    node.put(2, 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {alive, nearly, RUN, "notes", "A" * 32}
    assert len(files(tmp_path / RUN)) == 3


def test_a_run_does_not_sweep_itself_when_the_clock_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 100 * DAY
    monkeypatch.setattr(time, "time", lambda: later)
    node = Node(tmp_path, 0)
    node.put(1, 0)
    assert node.versions() == [1]


def test_nothing_is_swept_while_the_state_is_small(tmp_path: Path) -> None:
    Node(tmp_path, 0).put(1, 0)
    age(tmp_path / RUN, 100)
    node = Node(tmp_path, LIMIT_BYTES)
    node.open(run=OTHER).put(1, 0, tensors(1), "all")
    assert len(files(tmp_path)) == 1


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    outside, folder, linked = tmp_path / "outside", tmp_path / "states", "1" * 32
    node = Node(folder, 0)
    node.open(run=linked).put(1, 0, tensors(1), "all")
    (folder / linked).rename(outside)
    (outside / "precious").write_text("")
    age(outside, 100)
    (folder / linked).symlink_to(outside)
    dead = folder / ("2" * 32)
    dead.mkdir()
    (dead / "link").symlink_to(outside)
    age(dead, 100)

    node.put(1, 0)  # sweeps
    assert not dead.exists()
    assert node.open(run=linked).get(1) is None
    with pytest.raises(OSError, match="symbolic link") as caught:
        node.open(run=linked).put(1, 0, tensors(1), "all")
    assert caught.value.errno == errno.ELOOP
    forget(folder, linked)
    assert [path.name for path in folder.iterdir()] == [RUN]
    assert files(outside) == ["13/control-1.safetensors", "precious"]


def test_a_link_in_place_of_a_version_is_not_read(tmp_path: Path) -> None:
    node = Node(tmp_path / "states", 0)
    node.put(1, 0)
    path = tmp_path / "states" / RUN / "13" / "control-1.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert node.open().get(1) is None
    node.put(1, 0)
    assert node.versions() == [1] and not path.is_symlink()


def test_what_forget_cannot_remove_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Node(tmp_path, 0).put(1, 0)
    monkeypatch.setattr(client_files.shutil, "rmtree", lambda path, ignore_errors: None)
    with caplog.at_level("WARNING", logger="flwr"):
        forget(tmp_path, RUN)
    assert f"cannot be removed: {tmp_path / RUN}" in caplog.text
