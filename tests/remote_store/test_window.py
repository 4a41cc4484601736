"""The client's window: the messages that it sends, their order, and the outcome of requests after failures."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudafuture import CUDAFuture
from cudafuture.errors import ChecksumError, StorageError, WorkerLostError
from cudafuture.io import digest, digests
from remote_store import messages as wire
from remote_store.windows import HOUR, Client
from support.patience import PATIENCE


@pytest.fixture
def client() -> Client:
    return Client()


def test_small_requests_wait_and_share_batch(client: Client) -> None:
    first = client.write("a", torch.ones(1))
    rest = [client.write(key, torch.ones(1)) for key in "bcd"]
    reading = client.read("e")
    assert [message.keys for message in client.messages] == [["a"], ["e"]]
    client.messages[0].answer()
    assert first.wait(timeout=PATIENCE) == 4
    assert client.messages[2].keys == ["b", "c", "d"]
    client.messages[2].answer({1: OSError("no disk")})
    assert [future.exception(timeout=PATIENCE) is None for future in rest] == [True, False, True]
    client.messages[1].give(torch.arange(3))
    assert reading.wait(timeout=PATIENCE)[0].tolist() == [0, 1, 2]


def test_full_batch_is_sent_at_once(client: Client) -> None:
    client.write("first", torch.ones(1))
    for i in range(wire.MOST_ENTRIES):
        client.write(f"{i}", torch.ones(1))
    assert [len(message.entries) for message in client.messages] == [1, wire.MOST_ENTRIES]


def test_operation_names_predecessor_without_waiting(client: Client) -> None:
    client.write("a", torch.ones(1))
    client.read("a")
    client.delete("a")
    client.read("b")
    write, read, delete = client.messages
    assert (write.entries[0].sequence, write.entries[0].after) == (1, 0)
    assert (read.entries[0].sequence, read.entries[0].after) == (2, 1)
    assert (delete.entries[0].sequence, delete.entries[0].after) == (3, 2)
    read.give(torch.ones(1))
    assert (client.messages[3].keys, client.messages[3].entries[0].after) == (["b"], 0)


def test_operation_is_sent_after_predecessor(client: Client) -> None:
    client.write("x", torch.ones(1))
    client.write("a", torch.ones(1))  # waits for the batch in flight
    client.delete("a")
    assert [message.keys for message in client.messages] == [["x"]]
    client.messages[0].answer()
    assert [(message.verb, message.keys) for message in client.messages[1:]] == [
        (wire.PUT, ["a"]),
        (wire.DELETE, ["a"]),
    ]
    assert client.messages[2].entries[0].after == client.messages[1].entries[0].sequence


def test_writes_of_one_key_use_separate_messages(client: Client) -> None:
    client.write("x", torch.ones(1))
    client.write("a", torch.ones(1))
    client.write("a", torch.zeros(1))
    client.messages[0].answer()
    assert client.messages[1].keys == ["a"]
    client.messages[1].answer()
    assert client.messages[2].keys == ["a"]
    assert client.messages[2].request.data.view(torch.float32).tolist() == [0]


def test_window_bounds_bytes_in_flight() -> None:
    client = Client(size=3 << 20)
    futures = [client.write(f"{i}", torch.zeros(2 << 20, dtype=torch.uint8)) for i in range(3)]
    large = client.write("large", torch.zeros(4 << 20, dtype=torch.uint8))
    assert client.statistics()[:3] == (2 << 20, 8 << 20, 3 << 20)
    for i in range(3):
        assert [message.keys for message in client.messages[i:]] == [[f"{i}"]]
        client.messages[i].answer()
    assert client.messages[3].keys == ["large"]  # more than the window, alone
    client.messages[3].answer()
    assert [future.wait(timeout=PATIENCE) for future in [*futures, large]] == [2 << 20] * 3 + [4 << 20]
    assert client.statistics()[:3] == (0, 0, 3 << 20)


def test_message_is_resent_after_full_rpc(client: Client) -> None:
    client.channel.refusals = 3
    writing = client.write("a", torch.ones(1))
    behind = client.read("b")
    for _ in range(2):
        client.channel.arrived.get(timeout=PATIENCE)
    assert [message.keys for message in client.messages] == [["a"], ["b"]]
    client.messages[0].answer()
    client.messages[1].give(torch.ones(1))
    assert writing.wait(timeout=PATIENCE) == 4
    behind.wait(timeout=PATIENCE)


def test_immediate_timer_resends_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudafuture.timer.schedule", lambda window, due: window.look(due))
    client = Client()
    client.channel.refusals = 1
    client.write("a", torch.ones(1))
    assert [message.keys for message in client.messages] == [["a"]]


def test_failed_timer_blocks_no_later_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr("cudafuture.timer.schedule", refuse)
    client = Client()
    client.channel.refusals = 1
    assert "no more threads" in str(client.write("a", torch.ones(1)).exception(timeout=PATIENCE))
    client.write("b", torch.ones(1))
    assert [message.keys for message in client.messages] == [["b"]]


def test_freed_tensor_fails_its_write_alone(client: Client) -> None:
    freed = torch.ones(1)
    client.write("first", torch.ones(1))
    lost, kept = client.write("a", freed), client.write("b", torch.ones(1))
    freed.untyped_storage().resize_(0)
    client.messages[0].answer()
    assert isinstance(lost.exception(timeout=PATIENCE), ValueError)
    assert client.messages[1].keys == ["b"]
    client.messages[1].answer()
    assert kept.wait(timeout=PATIENCE) == 4


def test_number_of_tensors_is_that_of_keys(client: Client) -> None:
    for tensors, expected in (([torch.ones(1)] * 2, [None]), ([], []), ([torch.ones(1)], [None, None])):
        with pytest.raises(ValueError, match="one for each key"):
            client.window.write(["a"], tensors, 0, expected, None)
    assert client.flush(with_reads=True).done()


def test_modes_of_a_thread_do_not_apply_to_messages(client: Client) -> None:
    tensors = {"small": torch.arange(3), "large": torch.arange(1 << 18).view(2, -1).t()}
    with FakeTensorMode(), torch.inference_mode():
        for key, tensor in tensors.items():
            client.write(key, tensor)
        reading = client.read("x")
    for message, tensor in zip(client.messages, tensors.values(), strict=False):
        (entry,) = message.entries
        sent = wire.data_of(message.request.data, entry)
        assert torch.equal(sent.view(tensor.dtype), tensor.reshape(-1))
    client.messages[2].give(torch.arange(3))
    assert reading.wait(timeout=PATIENCE)[0].tolist() == [0, 1, 2]


def test_deadline_fails_request_anywhere() -> None:
    client = Client(size=1 << 20, seconds=HOUR)
    in_flight = client.write("a", torch.zeros(1 << 20, dtype=torch.uint8))
    outgoing = client.write("b", torch.zeros(1 << 20, dtype=torch.uint8))
    held = client.delete("b")
    client.end_time()
    for future, where in ((in_flight, "has no reply"), (outgoing, "was not sent"), (held, "was not sent")):
        error = future.exception(timeout=PATIENCE)
        assert isinstance(error, TimeoutError)
        assert where in str(error)
        assert "write" in str(error) or "delete" in str(error)
    client.messages[0].answer()  # too late, and nothing of the others is sent
    assert [message.verb for message in client.messages] == [wire.PUT]
    assert client.statistics()[:2] == (0, 0)


def test_unsent_predecessor_is_not_named() -> None:
    client = Client(size=1 << 20, seconds=HOUR)
    client.write("x", torch.zeros(1 << 20, dtype=torch.uint8))
    dropped = client.write("a", torch.zeros(1 << 20, dtype=torch.uint8))
    client.end_time()
    assert isinstance(dropped.exception(timeout=PATIENCE), TimeoutError)
    client.messages[0].answer()
    client.read("a")
    assert client.messages[-1].entries[0].after == 0


def test_unsent_failure_keeps_earlier_predecessor(client: Client) -> None:
    large = client.write("a", torch.zeros(2 << 20, dtype=torch.uint8))
    spoilt = client.write("a", torch.ones(1), digest=1)
    assert isinstance(spoilt.exception(timeout=PATIENCE), ChecksumError)
    client.read("a")
    assert not large.done()
    assert [message.verb for message in client.messages] == [wire.PUT, wire.GET]
    assert client.messages[1].entries[0].after == client.messages[0].entries[0].sequence


def test_failure_in_flight_keeps_earlier_predecessor(client: Client) -> None:
    client.write("a", torch.ones(1))
    lost = client.delete("a")
    client.messages[1].listener.failed(RuntimeError("it was refused"))
    assert isinstance(lost.exception(timeout=PATIENCE), RuntimeError)
    client.read("a")
    assert (client.messages[-1].verb, client.messages[-1].entries[0].after) == (wire.GET, 1)


def test_message_returns_room_once(client: Client) -> None:
    client.write("a", torch.ones(1))
    client.messages[0].listener.failed(RuntimeError("it was interrupted"))
    client.messages[0].answer()
    client.write("b", torch.ones(1))
    assert client.statistics()[0] == 4
    assert client.messages[-1].keys == ["b"]


def test_service_learns_of_awaited_failed_request(client: Client) -> None:
    lost = client.write("a", torch.ones(1))
    client.read("a")
    client.messages[0].listener.failed(RuntimeError("it was refused"))
    assert isinstance(lost.exception(timeout=PATIENCE), RuntimeError)
    assert (client.messages[2].verb, client.messages[2].entries) == (wire.ABANDON, [wire.KeyEntry(1, 0, 0.0, "a")])


def test_failed_part_abandons_tensor(client: Client) -> None:
    tensor = torch.zeros(wire.PART + 1, dtype=torch.uint8)
    writing = client.write("a", tensor)
    assert [message.entries[0].part for message in client.messages] == [0, 1]
    assert {message.entries[0].sequence for message in client.messages} == {1}
    client.messages[0].listener.failed(RuntimeError("it was refused"))
    assert isinstance(writing.exception(timeout=PATIENCE), RuntimeError)
    assert client.messages[2].verb == wire.ABANDON


def test_worker_loss_fails_all_requests(client: Client) -> None:
    client.channel.error = WorkerLostError("it is gone", worker="there")
    futures: list[CUDAFuture[Any]] = [client.write("a", torch.ones(1)), client.read("b", "c"), client.delete("a")]
    for future in futures:
        assert isinstance(future.exception(timeout=PATIENCE), WorkerLostError)
    assert client.statistics()[:2] == (0, 0)


def test_failed_read_spares_others_in_message(client: Client) -> None:
    first = client.read("x")
    wrong, good = client.read("a", outs=[torch.zeros(5)]), client.read("b")
    client.messages[0].give(torch.ones(1))
    first.wait(timeout=PATIENCE)
    client.messages[1].give(torch.ones(2), torch.full((3,), 7.0))
    assert isinstance(wrong.exception(timeout=PATIENCE), ValueError)
    assert good.wait(timeout=PATIENCE)[0].tolist() == [7, 7, 7]


@pytest.mark.parametrize("seed", [0, 9])
def test_corrupted_bytes_are_reread_and_verified(seed: int) -> None:
    client, tensor, out = Client(seconds=HOUR), torch.ones(3), torch.zeros(3)
    (kept,) = digests(tensor, [(0, 12)], [seed])
    reading = client.read("a", outs=[out])
    client.messages[0].give(tensor + 1, kept=(kept, seed))
    assert (reading.done(), out.tolist()) == (False, [0, 0, 0])
    first, second = (message.entries[0] for message in client.messages)
    assert (first.needs_digest, second.needs_digest) == (False, True)
    assert (second.key, second.after, second.expires) == ("a", 0, first.expires)
    behind = client.write("a", tensor)
    assert client.messages[2].entries[0].after == second.sequence
    client.messages[1].give(tensor)
    assert reading.wait(timeout=PATIENCE) == [out]
    assert out.tolist() == [1, 1, 1]
    client.messages[2].answer()
    behind.wait(timeout=PATIENCE)
    assert client.statistics()[:2] == (0, 0)


def test_matching_store_digest_ends_read(client: Client) -> None:
    (kept,) = digests(torch.ones(3), [(0, 12)], [9])
    reading = client.read("a")
    client.messages[0].give(torch.ones(3), kept=(kept, 9))
    assert reading.wait(timeout=PATIENCE)[0].tolist() == [1, 1, 1]
    assert len(client.messages) == 1


def test_second_read_needs_service_digest(client: Client) -> None:
    """The second one is the last: it fails if the digest is missing, or is not that of the bytes."""
    missing, other = client.read("a"), client.read("b")
    client.messages[0].give(torch.ones(1), kept=(1, 1))
    client.messages[1].give(torch.ones(1), kept=(1, 1))
    client.messages[2].give(torch.ones(1), kept=(1, 1))
    error = missing.exception(timeout=PATIENCE)
    assert isinstance(error, ValueError)
    assert "the reply has no digest" in str(error)
    (again,) = (message for message in client.messages[3:] if message.keys == ["b"])
    changed = wire.Found(torch.float32, (1,), 4, 0, 4, 1, (1, 1))
    again.listener.answered(*wire.pack_answer(wire.GET, 1, {}, [changed], torch.zeros(64, dtype=torch.uint8)))
    assert isinstance(other.exception(timeout=PATIENCE), ChecksumError)
    assert client.statistics() == (0, 0, 1 << 30, 2)


def test_caller_gets_only_service_digests(client: Client) -> None:
    told = torch.zeros(1, dtype=torch.uint64)
    reading = client.read("a", digests=told)
    assert client.messages[0].entries[0].needs_digest
    client.messages[0].give(torch.ones(1), kept=(digest(torch.ones(1)), 0))
    assert isinstance(reading.exception(timeout=PATIENCE), ValueError)


def test_second_read_keeps_deadline_or_gets_error() -> None:
    client = Client(seconds=HOUR)
    begin = time.perf_counter()
    damaged, late = client.read("a"), client.read("b", outs=[torch.zeros(1)])
    client.window.seconds = 2 * HOUR
    younger = client.read("c")
    client.messages[0].give(torch.ones(1), kept=(1, 1))
    client.messages[1].give(torch.ones(1), torch.ones(1), kept=(1, 1))
    again = {key: message for message in client.messages[2:] for key in message.keys}
    again["a"].answer({0: ChecksumError("its bytes on the disk are not those that were written")})
    assert "on the disk" in str(damaged.exception(timeout=PATIENCE))
    client.window.look(begin + 1.5 * HOUR)
    assert isinstance(late.exception(timeout=PATIENCE), TimeoutError)
    assert not younger.done()


def test_expired_read_is_not_repeated() -> None:
    """The last part of a damaged tensor arrives after the deadline."""
    reader, data = Client(seconds=HOUR), torch.zeros(wire.PART + 64, dtype=torch.uint8)
    reading = reader.read("a", outs=[torch.empty_like(data)])
    first = wire.Found(torch.uint8, tuple(data.shape), data.nbytes, 0, wire.PART, None, (1, 1))
    reader.messages[0].listener.answered(*wire.pack_answer(wire.GET, 1, {}, [first], data[: wire.PART].clone()))
    reader.end_time()
    reader.messages[1].listener.answered(
        *wire.pack_answer(wire.FETCH, 1, {}, [wire.Part(0, 64, None)], data[:64].clone())
    )
    assert isinstance(reading.exception(timeout=PATIENCE), TimeoutError)
    assert [message.verb for message in reader.messages] == [wire.GET, wire.FETCH]


def test_read_behind_later_operation_is_not_repeated(client: Client) -> None:
    reading, writing = client.read("a"), client.write("a", torch.zeros(1))
    client.messages[1].answer()
    writing.wait(timeout=PATIENCE)
    client.messages[0].give(torch.ones(1), kept=(1, 1))
    error = reading.exception(timeout=PATIENCE)
    assert isinstance(error, ChecksumError)
    assert "its 4 bytes have changed on the disk or on the way" in str(error)
    assert [message.verb for message in client.messages] == [wire.GET, wire.PUT, wire.ABANDON]


def test_late_answer_fills_nothing() -> None:
    client, out = Client(seconds=HOUR), torch.zeros(3)
    reading = client.read("a", outs=[out])
    client.end_time()
    assert isinstance(reading.exception(timeout=PATIENCE), TimeoutError)
    client.messages[0].give(torch.ones(3))
    assert out.tolist() == [0, 0, 0]


def test_window_keeps_no_done_request(client: Client) -> None:
    stuck = client.delete("stuck")
    for key in "abc":
        tensor, out = torch.ones(3), torch.zeros(3)
        gone = weakref.ref(tensor), weakref.ref(out)
        writing, reading = client.write(key, tensor), client.read(key, outs=[out])
        client.messages[-2].answer()
        client.messages[-1].give(torch.ones(3))
        assert (writing.done(), reading.done()) == (True, True)
        del tensor, out, writing, reading
        client.messages[1:] = []
        assert [ref() for ref in gone] == [None, None]
    assert not stuck.done()


def test_finalizer_may_use_window() -> None:
    """The window drops the objects of a done request, whose finalizers may call the window again."""
    client = Client(seconds=HOUR)
    stuck = client.delete("stuck")
    written = torch.zeros(1, dtype=torch.bool)
    client.write("a", torch.ones(1), written=written)
    later: list[Any] = []
    weakref.finalize(written, lambda: later.append(client.delete("later")))
    del written
    client.messages[1].answer()
    client.messages[0].answer()
    del client.messages[:2]
    client.window.look(time.perf_counter())
    gc.collect()
    client.read("b")
    assert stuck.done()
    assert [message.keys for message in client.messages] == [["later"], ["b"]]
    assert client.messages[1].request.oldest == client.messages[0].entries[0].sequence
    client.end_time()
    assert isinstance(later[0].exception(timeout=PATIENCE), TimeoutError)


def test_disk_error_survives_resized_outcome_tensor(client: Client) -> None:
    written = torch.zeros(1, dtype=torch.bool)
    writing = client.write("a", torch.ones(1), written=written)
    written.resize_(5)
    client.messages[0].answer({0: StorageError("no disk")})
    assert isinstance(writing.exception(timeout=PATIENCE), StorageError)


def test_invalid_answer_fails_its_requests(client: Client) -> None:
    reading = client.read("a")
    client.messages[0].listener.answered(b"nonsense", [])
    assert isinstance(reading.exception(timeout=PATIENCE), ValueError)


class Sealed(Exception):
    """An exception that takes no attributes and cannot be copied."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        raise TypeError("not to be copied")


def test_error_without_notes_ends_operation(client: Client) -> None:
    error = Sealed("sealed")
    writing = client.write("a", torch.ones(1))
    client.messages[0].listener.failed(error)
    assert writing.exception(timeout=PATIENCE) is error


def test_flush_waits_and_raises_errors(client: Client) -> None:
    client.read("a")
    assert client.flush(with_reads=False).done()
    client.write("b", torch.ones(1))
    flush = client.flush(with_reads=False)
    assert not flush.done()
    client.messages[1].answer({0: StorageError("no disk")})
    assert isinstance(flush.exception(timeout=PATIENCE), StorageError)
    assert not client.flush(with_reads=True).done()
