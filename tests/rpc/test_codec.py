"""Values as payloads beside tensors, and back."""

from __future__ import annotations

import math
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_ext import _C
from rpc_ext._codec import (
    NO_DEVICES,
    DeviceMap,
    PayloadKind,
    decode,
    encode,
    has_rrefs,
    kind_of,
    targets_of,
)

pytestmark = pytest.mark.usefixtures("on_the_host")

KINDS = [PayloadKind.CALL, PayloadKind.VALUE, PayloadKind.FAILURE, PayloadKind.BATCH]  # of payloads that are pickled
META = torch.device("meta")  # of a device that there is everywhere
STAGED = DeviceMap("other", {}, {META: torch.device("cuda", 3)})

ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=100)
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16]),
)
VALUES = st.recursive(
    ATOMS | TENSORS,
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.tuples(parts, parts)
        | st.dictionaries(st.text(max_size=5), parts, max_size=4)
        | st.builds(lambda value: {"twice": [value, value]}, parts)
    ),
    max_leaves=20,
)


def flat(value: Any) -> Any:
    """Return something that compares: tensors by their content, nan with itself."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [flat(part) for part in value])
    if isinstance(value, dict):
        return {key: flat(part) for key, part in value.items()}
    return (type(value).__name__, value)


@given(VALUES, st.sampled_from(KINDS))
@settings(deadline=None)
def test_encoded_value_is_decoded(value: Any, kind: int) -> None:
    encoded = encode(kind, value)
    assert encoded.payload.startswith(_C.MAGIC)
    assert kind_of(encoded.payload) == kind
    assert not has_rrefs(encoded.payload)
    assert targets_of(encoded.payload) is None
    assert encoded.targets is None
    assert flat(decode(encoded.payload, encoded.tensors)) == flat(value)


@given(VALUES)
@settings(deadline=None)
def test_tensors_travel_beside_and_not_inside(value: Any) -> None:
    encoded = encode(PayloadKind.VALUE, value)
    assert all(type(tensor) is torch.Tensor for tensor in encoded.tensors)
    replaced = [torch.full_like(tensor, 1) for tensor in encoded.tensors]
    for tensor in encode(PayloadKind.VALUE, decode(encoded.payload, replaced)).tensors:
        assert any(tensor is one for one in replaced)
    assert encoded.size == len(encoded.payload) + sum(tensor.nbytes for tensor in encoded.tensors)


def test_repeated_tensor_is_sent_once() -> None:
    tensor = torch.ones(3)
    encoded = encode(PayloadKind.VALUE, [tensor, {"again": tensor}, torch.ones(3)])
    assert len(encoded.tensors) == 2
    assert encoded.tensors[0] is tensor
    got = decode(encoded.payload, encoded.tensors)
    assert got[0] is got[1]["again"]


class Wrapped(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:.*beta state.*")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse().coalesce(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["coo", "coalesced", "csr", "bsr", "parameter"],
)
def test_other_tensors_become_plain_ones(make: Any) -> None:
    tensor = make()
    encoded = encode(PayloadKind.VALUE, tensor)
    assert encoded.tensors
    assert all(type(t) is torch.Tensor and t.layout is torch.strided for t in encoded.tensors)
    got = decode(encoded.payload, encoded.tensors)
    assert (type(got), got.layout) == (type(tensor), tensor.layout)
    assert torch.equal(got.to_dense(), tensor.to_dense())


def test_subclass_keeps_its_type() -> None:
    tensor = torch.ones(2).as_subclass(Wrapped)
    got = decode(*parts_of(encode(PayloadKind.VALUE, tensor)))
    assert type(got) is Wrapped
    assert got.tolist() == [1, 1]


def parts_of(encoded: Any) -> tuple[bytes, list[torch.Tensor]]:
    return encoded.payload, encoded.tensors


@given(st.lists(st.booleans(), min_size=1, max_size=10))
@settings(deadline=None)
def test_device_tensors_name_their_target(on_device: list[bool]) -> None:
    value = [torch.ones(2, device=META if there else "cpu") for there in on_device]
    encoded = encode(PayloadKind.CALL, value, STAGED)
    wanted = ["cuda:3" if there else None for there in on_device]
    assert encoded.targets == (wanted if any(on_device) else None)
    assert targets_of(encoded.payload) == encoded.targets
    host = [torch.full((2,), i) for i in range(len(value))]
    assert [t.tolist() for t in decode(encoded.payload, host)] == [[i, i] for i in range(len(value))]


def test_device_without_target_fails_one_value() -> None:
    with pytest.raises(ValueError, match=r"a tensor on meta cannot be sent to worker ''.*mapped: nothing"):
        encode(PayloadKind.VALUE, [torch.ones(2), torch.ones(2, device=META)])
    encoded = encode(PayloadKind.VALUE, 3)
    assert (encoded.tensors, decode(*parts_of(encoded))) == ([], 3)


def test_native_devices_are_not_staged() -> None:
    native = DeviceMap("other", {META: META}, {})
    encoded = encode(PayloadKind.VALUE, torch.ones(2, device=META), native)
    assert (encoded.targets, targets_of(encoded.payload)) == (None, None)


class Raises:
    def __reduce__(self) -> Any:
        raise LookupError("does not pickle")


class Nested:
    """Encodes and decodes while it is itself encoded or decoded, as an object may that makes calls."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> Any:
        encoded = encode(PayloadKind.VALUE, [self.tensor, torch.zeros(1)])
        return encoded.payload, encoded.tensors

    def __setstate__(self, state: Any) -> None:
        self.tensor = decode(*state)[0]


def test_error_leaves_nothing_behind() -> None:
    for _ in range(3):
        with pytest.raises(LookupError):
            encode(PayloadKind.VALUE, [torch.ones(3), Raises()])
        assert encode(PayloadKind.VALUE, [torch.ones(1)]).tensors[0].shape == (1,)
        with pytest.raises(LookupError):
            decode(*parts_of(encode(PayloadKind.VALUE, [torch.ones(3), FailsToUnpickle()])))
        assert decode(*parts_of(encode(PayloadKind.VALUE, torch.ones(2)))).shape == (2,)


class FailsToUnpickle:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise LookupError("does not unpickle")


def test_values_may_encode_during_encoding() -> None:
    value = [torch.ones(1), Nested(torch.full((2,), 7.0)), torch.full((3,), 9.0)]
    got = decode(*parts_of(encode(PayloadKind.VALUE, value)))
    assert [got[0].tolist(), got[1].tensor.tolist(), got[2].tolist()] == [[1], [7, 7], [9, 9, 9]]


def test_repeated_object_forgets_first_time() -> None:
    shared = ["a", "list"]
    first, second = encode(PayloadKind.VALUE, [shared]), encode(PayloadKind.VALUE, [shared])
    assert first.payload == second.payload
    assert decode(second.payload, []) == [shared]


def test_large_value_between_small_ones_decodes() -> None:
    for size in (10, 1 << 20, 10):
        assert decode(*parts_of(encode(PayloadKind.VALUE, b"x" * size))) == b"x" * size
    assert len(encode(PayloadKind.VALUE, b"x" * 10).payload) < 100


def test_cut_payload_is_error() -> None:
    payload = encode(PayloadKind.VALUE, {"a": [1, 2, 3]}).payload
    for length in range(len(_C.MAGIC) + 2, len(payload)):
        with pytest.raises((pickle.UnpicklingError, EOFError, IndexError, ValueError)):
            decode(payload[:length], [])


def test_threads_encode_side_by_side() -> None:
    wrong: list[Any] = []

    def use(thread: int) -> None:
        for i in range(300):
            value = [torch.full((2,), thread), i, torch.full((1,), i)]
            got = decode(*parts_of(encode(PayloadKind.VALUE, value, NO_DEVICES)))
            if flat(got) != flat(value):
                wrong.append((thread, i))

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
