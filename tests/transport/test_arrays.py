import pickle

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)

from fedfrozen_app.transport.arrays import TensorArray, to_record, to_tensors
from fedfrozen_app.transport.ledger import payload_bytes, wire_bytes

TENSORS = {
    "weight": torch.arange(77, dtype=torch.float32).reshape(7, 11) / 3,
    "column": torch.arange(26, dtype=torch.float64).reshape(2, 13).t(),
    "half": torch.linspace(-1, 1, 5, dtype=torch.float16),
    "counter": torch.tensor(17),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
    # above Flower's chunk size of 5 MiB, so that it is sent in two chunks
    "large": torch.ones(1_400_003) * 0.7,
}


def flower_record() -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.numpy().copy()) for name, tensor in TENSORS.items()})


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_array_is_a_flower_array_on_the_wire(name: str) -> None:
    ours = TensorArray(TENSORS[name])
    # np.save keeps Fortran order, a message is always sent in C order
    theirs = Array(np.ascontiguousarray(TENSORS[name].numpy()).reshape(TENSORS[name].shape))
    assert ours.data == theirs.data
    assert ours.object_id == theirs.object_id
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)


def test_a_tensor_array_keeps_no_bytes_of_its_own() -> None:
    array = TensorArray(TENSORS["weight"])
    assert len(array.data) > 0
    assert "data" not in vars(array)
    assert vars(array)["tensor"].data_ptr() == TENSORS["weight"].data_ptr()


def test_numpy_of_a_tensor_array_may_be_written_without_changing_the_tensor() -> None:
    tensor = torch.zeros(3)
    values = TensorArray(tensor).numpy()
    values += 1
    assert tensor.tolist() == [0, 0, 0]


def test_to_tensors_shares_what_to_record_was_given() -> None:
    back = to_tensors(to_record(TENSORS))
    assert list(back) == list(TENSORS)
    assert all(back[name].data_ptr() == TENSORS[name].data_ptr() for name in TENSORS)


def test_to_tensors_reads_a_flower_record_bit_for_bit() -> None:
    back = to_tensors(flower_record())
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS.items())


def test_pickling_moves_the_values_out_of_band() -> None:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(to_record(TENSORS), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 3_000
    assert sum(buffer.raw().nbytes for buffer in buffers) >= 5_600_000
    back = pickle.loads(pickled, buffers=buffers)
    assert back == to_record(TENSORS)


def content(record: ArrayRecord) -> RecordDict:
    return RecordDict(
        {
            "arrays": record,
            "config": ConfigRecord({"server-round": 3, "name": "é"}),
            "metrics": MetricRecord({"loss": 0.5, "many": [1, 2, 3]}),
        }
    )


@pytest.mark.parametrize("make", [flower_record, lambda: to_record(TENSORS)])
def test_wire_bytes_are_the_bytes_flower_sends(make: object) -> None:
    message = content(make())  # type: ignore[operator]
    objects = get_all_nested_objects(message).values()
    assert wire_bytes(message) == sum(len(item.deflate()) for item in objects)


def test_wire_bytes_of_an_empty_content() -> None:
    assert wire_bytes(RecordDict()) == len(RecordDict().deflate())


def test_payload_bytes_count_elements_and_nothing_else() -> None:
    expected = 77 * 4 + 26 * 8 + 5 * 2 + 8 + 3 + 0 + 1_400_003 * 4
    assert payload_bytes(content(to_record(TENSORS))) == expected
    assert payload_bytes(content(flower_record())) == expected
    assert payload_bytes(RecordDict()) == 0
    odd = ArrayRecord()
    odd["w"] = Array("bfloat16", (3,), "numpy.ndarray", b"123456")
    assert payload_bytes(content(odd)) == 6  # a dtype NumPy does not know: what was sent
    assert wire_bytes(content(odd)) > 6


def test_messages_that_share_a_record_share_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TensorArray] = []
    data = vars(TensorArray)["data"].fget

    def counting(array: TensorArray) -> bytes:
        made.append(array)
        return bytes(data(array))

    monkeypatch.setattr(TensorArray, "data", property(counting))
    record = to_record(TENSORS)
    contents = [RecordDict({"arrays": record, "config": ConfigRecord({"i": i})}) for i in range(4)]
    with no_object_id_recompute():  # as Flower's grid sends messages
        for content in contents:
            get_all_nested_objects(content)
            get_object_tree(content)
    assert len(made) == len(TENSORS)
