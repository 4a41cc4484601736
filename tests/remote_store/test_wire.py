"""The messages of a store client: a second implementation of the format parses them, and packs their answers."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudafuture.errors import AuthenticationError, ChecksumError, NotFoundError, QuotaError, StorageError
from cudafuture.io import digest
from remote_store import messages as wire
from remote_store.windows import Client, Message
from rpc_ext import _C
from support.patience import PATIENCE
from support.soak import soak_count


def contents_of(message: Message) -> list[tuple[str, torch.dtype, tuple[int, ...], bytes]]:
    """Return key, dtype, shape and bytes of each tensor of a PUT, after a check of their digests."""
    request = message.request
    for entry in message.entries:
        assert entry.at % wire.LINE == 0
        assert digest(wire.data_of(request.data, entry)) == entry.digest
        assert (entry.part, entry.nbytes) == (0, entry.length)
    return [
        (entry.key, entry.dtype, entry.shape, wire.data_of(request.data, entry).numpy().tobytes())
        for entry in message.entries
    ]


def content_of(key: str, tensor: torch.Tensor) -> tuple[str, torch.dtype, tuple[int, ...], bytes]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return key, tensor.dtype, tuple(tensor.shape), data


def test_request_names_its_session_and_service() -> None:
    client = Client()
    client.window.token = bytes(range(wire.TOKEN))
    client.delete("layer 3/ü")
    request = client.messages[0].request
    assert (request.verb, request.token, request.oldest, request.service) == (
        wire.DELETE,
        bytes(range(wire.TOKEN)),
        1,
        "store",
    )
    assert [entry.key for entry in request.entries] == ["layer 3/ü"]
    assert request.data.numel() == 0


@pytest.mark.parametrize("dtype", wire.DTYPES, ids=str)
def test_every_dtype_has_code(dtype: torch.dtype) -> None:
    client = Client()
    tensor = torch.arange(2, 2 + 6 * dtype.itemsize).remainder(2).to(torch.uint8).view(dtype).reshape(2, 3)
    client.write("x", tensor)
    assert contents_of(client.messages[0]) == [content_of("x", tensor)]
    reading = client.read("x")
    client.messages[1].give(tensor)
    (read,) = reading.wait(timeout=PATIENCE)
    assert content_of("x", read) == content_of("x", tensor)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=30).filter(lambda key: "\0" not in key),
        st.lists(st.integers(0, 5), max_size=5),
        min_size=1,
        max_size=20,
    )
)
def test_parsing_restores_keys_and_shapes(shapes: dict[str, list[int]]) -> None:
    client = Client()
    tensors = {key: torch.arange(torch.Size(shape).numel()).reshape(shape) for key, shape in shapes.items()}
    client.write("\x01 first", torch.ones(1))
    writes = [client.write(key, tensor) for key, tensor in tensors.items()]
    client.messages[0].answer()  # the others go together
    assert contents_of(client.messages[1]) == [content_of(key, tensor) for key, tensor in tensors.items()]
    client.messages[1].answer()
    assert [write.wait(timeout=PATIENCE) for write in writes] == [tensor.nbytes for tensor in tensors.values()]
    reading = client.read(*tensors)
    client.messages[2].give(*tensors.values())
    assert all(map(torch.equal, reading.wait(timeout=PATIENCE), tensors.values()))


@pytest.mark.parametrize(("nbytes", "count"), [(wire.INLINE, 0), (wire.INLINE + 1, 1)])
def test_large_data_travels_as_tensor(nbytes: int, count: int) -> None:
    client, tensor = Client(), torch.randint(256, (nbytes,), dtype=torch.uint8)
    client.write("x", tensor)
    assert len(client.messages[0].tensors) == count
    assert contents_of(client.messages[0]) == [content_of("x", tensor)]
    reading = client.read("x")
    client.messages[1].give(tensor)
    assert torch.equal(reading.wait(timeout=PATIENCE)[0], tensor)


@pytest.mark.parametrize("key", ["", "a\0b", "ü" * 501, "\ud800"], ids=["empty", "NUL", "too long", "no UTF-8"])
def test_invalid_keys_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"key has|NUL|not UTF-8"):
        _C.expect_key(key)


@pytest.mark.parametrize(
    "error",
    [
        StorageError("the disk is full", errno=28, path="/a/slab", offset=4096, wanted=10, got=3),
        ChecksumError("the bytes differ", path="/a/slab", offset=1 << 40),
        QuotaError("no room"),
        NotFoundError("there is no key 'x'"),
        AuthenticationError("no session"),
        TimeoutError("late"),
        BlockingIOError("full"),
        ValueError("bad"),
        MemoryError("none"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_class_and_numbers(error: Exception) -> None:
    client = Client()
    writing = client.write("x", torch.ones(1))
    client.messages[0].answer({0: error})
    found = writing.exception(timeout=PATIENCE)
    assert type(found) is type(error)
    assert str(error) in str(found)
    if isinstance(error, StorageError):
        assert isinstance(found, StorageError)
        for name in ("errno", "path", "offset", "wanted", "got"):
            assert getattr(found, name) == getattr(error, name)


def change_some(numbers: random.Random, whole: bytes) -> bytes:
    """Return a message with one to three changes: other bytes, fewer bytes, or further bytes."""
    body = bytearray(whole)
    for _ in range(numbers.randrange(1, 4)):
        at = numbers.randrange(len(body) + 1)
        kind = numbers.randrange(3)
        if kind == 0:
            body[at : at + 1] = numbers.randbytes(1)
        elif kind == 1:
            del body[at : at + numbers.randrange(1, 20)]
        else:
            body[at:at] = struct.pack("<Q", numbers.getrandbits(64))
    return bytes(body)


def test_corrupted_answer_ends_its_reads() -> None:
    """Each read returns the tensor, or an error: the client does not fail otherwise, and does not block."""
    numbers = random.Random(2)
    tensors = [torch.arange(6.0), torch.arange(3, dtype=torch.int8)]
    client = Client()
    outcomes: dict[str, int] = {}
    for _ in range(soak_count(5_000)):
        client.messages.clear()
        reading: Any = client.read("a", "b", "c")
        request = client.messages[0]
        found = [
            wire.Found(tensor.dtype, tuple(tensor.shape), tensor.nbytes, 64 * i, tensor.nbytes, digest(tensor), None)
            for i, tensor in enumerate(tensors)
        ]
        data = torch.zeros(67, dtype=torch.uint8)
        for entry, tensor in zip(found, tensors, strict=True):
            wire.data_of(data, entry).copy_(tensor.view(torch.uint8))
        body, _ = wire.pack_answer(wire.GET, 3, {1: NotFoundError("there is no key 'b'")}, found, data)
        request.listener.answered(change_some(numbers, body), [])
        for later in client.messages[1:]:  # a read is repeated, or its other parts are asked for
            later.listener.failed(RuntimeError("it was refused"))
        error = reading.exception(timeout=PATIENCE)
        assert isinstance(error, Exception)
        outcomes[type(error).__name__] = outcomes.get(type(error).__name__, 0) + 1
    assert client.statistics()[:2] == (0, 0)
    assert {"NotFoundError", "ValueError"} <= outcomes.keys(), outcomes
