"""Messages between the ranks of a group: any number of tensors, of any size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.distributed.mailbox import Mailbox, Message
from cudafuture.errors import InvalidStateError
from cudafuture.testing import World
from support.patience import PATIENCE

pytestmark = pytest.mark.world(2)

FIRST = 256 << 10  # bytes that a receiver has asked for before a message comes
NUMBERS = 9 * 8  # bytes before the parts of a message with one tensor and no pickled object


def opened() -> tuple[Mailbox, SimpleQueue[Any]]:
    """Return the mailbox of this rank, and the queue of what it gets."""
    box, got = Mailbox(), SimpleQueue[Any]()
    box.open(lambda rank, message: got.put(message), lambda rank, error: got.put(error))
    return box, got


def exchange(messages: list[tuple[Any, list[torch.Tensor]]]) -> list[Message]:
    """Send messages to the other rank, all at once; return those of the other."""
    box, got = opened()
    for number, (body, tensors) in enumerate(messages):
        box.send(1 - box.rank, 3, (number, -number), "layout", body, tensors)
    received = [got.get(timeout=PATIENCE) for _ in messages]
    assert box.flush(range(box.size), PATIENCE)
    box.close()
    assert got.get(timeout=PATIENCE) is None
    return received


def numbers(size: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + size, dtype=torch.int64).remainder(251).to(torch.uint8)


def test_message_of_any_size_arrives_whole(world: World) -> None:
    sizes = [0, 1, FIRST - NUMBERS - 1, FIRST - NUMBERS, FIRST - NUMBERS + 1, FIRST, FIRST + 1, 3 * FIRST]
    orders = [*itertools.pairwise(sizes), *itertools.pairwise(reversed(sizes))]  # large ones between small ones
    messages = [(None, [numbers(size, i)]) for i, size in enumerate(itertools.chain(*orders))]

    def run() -> None:
        for i, message in enumerate(exchange(messages)):
            assert (message.channel, message.numbers, message.layout, message.body) == (3, (i, -i), "layout", None)
            assert torch.equal(message.tensors[0], messages[i][1][0])

    world.run(run)


def test_message_has_any_number_of_parts(world: World) -> None:
    def run() -> None:
        counts = [0, 1, 1000, FIRST // 8 + 100]  # the sizes of the last do not fit into the first bytes
        messages = [(count, [numbers(1 + i % 3, i) for i in range(count)]) for count in counts]
        for message, (count, tensors) in zip(exchange(messages), messages, strict=True):
            assert message.body == count
            assert len(message.tensors) == count
            assert torch.equal(torch.cat([torch.empty(0), *message.tensors]), torch.cat([torch.empty(0), *tensors]))

    world.run(run)


def test_many_messages_arrive_in_order(world: World) -> None:
    def run() -> None:
        messages = [(i, [torch.full((i % 7,), float(i))]) for i in range(1000)]
        received = exchange(messages)
        assert [message.body for message in received] == list(range(1000))
        assert all(torch.equal(m.tensors[0], tensors[0]) for m, (_, tensors) in zip(received, messages, strict=True))

    world.run(run)


def test_strides_and_shared_memory_are_kept(world: World) -> None:
    def run() -> None:
        matrix = torch.arange(12.0).reshape(3, 4)
        sent = [matrix.t(), matrix[1], torch.arange(5.0)[::2], torch.tensor([1 + 2j]).conj()]
        (message,) = exchange([(None, sent)])
        transposed, row, gaps, conjugate = message.tensors
        assert transposed.stride() == (1, 4)
        transposed.zero_()
        assert row.tolist() == [0] * 4
        assert gaps.tolist() == [0, 2, 4]
        assert conjugate.tolist() == [1 - 2j]

    world.run(run)


def test_message_waits_for_its_tensors(world: World) -> None:
    def run() -> None:
        box, got = opened()
        errors: SimpleQueue[BaseException] = SimpleQueue()
        tensors, failed = CUDAFuture[Sequence[torch.Tensor]](), CUDAFuture[Sequence[torch.Tensor]]()
        box.send(1 - box.rank, 0, tensors=tensors)
        box.send(1 - box.rank, 1, tensors=failed, failed=errors.put)
        box.send(1 - box.rank, 2)
        assert not box.flush(range(box.size), 0)
        tensors.set_result([torch.ones(3)])
        failed.set_exception(ValueError("no tensors"))
        received = [got.get(timeout=PATIENCE) for _ in range(2)]
        assert [message.channel for message in received] == [0, 2]
        assert received[0].tensors[0].tolist() == [1, 1, 1]
        assert str(errors.get(timeout=PATIENCE)) == "no tensors"
        box.close()
        assert got.get(timeout=PATIENCE) is None
        with pytest.raises(InvalidStateError, match="the mailbox is closed"):
            box.send(1 - box.rank, 0)

    world.run(run)
