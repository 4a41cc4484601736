"""Messages that are changed, exchanged or repeated on their way between two workers of a job with a secret."""

from __future__ import annotations

import itertools
import math
import re
import secrets
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture.errors import AuthenticationError, WorkerLostError
from cudafuture.testing import World
from rpc_ext import _codec, _listeners, rpc_async, rpc_sync
from support.attacker import MAGIC, SEAL_SIZE, Stranger
from support.middleman import FROM, TO, Change, Relay, be_worker, start_relay, tcp_only
from support.patience import PATIENCE
from support.rpc_callees import Gate, add, refusals, same, wait_for, waits
from support.soak import SOAK, soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("rpc-middleman")]

rpc: Any = torch_rpc
TIMEOUT = soak_count(3000)  # seconds that a test has
LIKELY = 3  # seconds in which a reply comes that comes at all
MARK, FORGED = b"of whom it is from the first to the last", b"of whom it was not, to the very last one"
CHANGED = "its signature is wrong"
ROUNDS = 200 if SOAK else 1  # of each attack


def be_relayed(
    file: str, attack: Callable[[Relay, rpc_ext.Session], Any], prepare: Callable[[], Any] = dict, **options: Any
) -> Any:
    """Run two workers. `attack` runs on the first, whose messages to the second pass through a relay.

    The first returns what `attack` returns and its refusals; the second what `prepare` has returned and its refusals.
    """
    rank, seen = dist.get_rank(), dict[str, Any]()
    if rank == 1:
        prepared = prepare()
        with be_worker(1, file, None, seen, **options):
            dist.barrier()
            return prepared, dict(rpc_ext.statistics().refused)
    with start_relay(seen) as relay, be_worker(0, file, relay, seen, **options) as session:
        found = attack(relay, session)
        dist.barrier()
        return found, dict(rpc_ext.statistics().refused)


def flip(at: int) -> Change:
    def change(data: bytearray, begin: int) -> None:
        data[begin + at] ^= 1

    return change


PARTS = {
    "magic": 3,
    "version": 4,
    "direction": 5,
    "contents": 6,
    "sender": 8,
    "receiver": 12,
    "counter": 16,
    "number": 24,
    "tag": 32,
    "mac": 48,
    "end of the mac": SEAL_SIZE - 1,
}


@pytest.mark.world(2, timeout=TIMEOUT)
@pytest.mark.parametrize("way", [TO, FROM])
def test_changed_message_fails_at_caller(world: World, tmp_path: Path, way: int) -> None:
    def attack(relay: Relay, session: rpc_ext.Session) -> dict[str, str]:
        errors = {}
        for _, what in itertools.product(range(ROUNDS), (*PARTS, "payload")):
            for call in (rpc_sync, rpc.rpc_sync):
                assert call("w1", same, (MARK,)) == MARK
                if what == "payload":
                    relay.replace_next(way, MARK, FORGED)
                else:
                    relay.change_next(way, flip(PARTS[what]))
                with pytest.raises(RuntimeError, match="was refused") as caught:
                    call("w1", same, (MARK,))
                if call is rpc_sync:
                    errors[what] = f"{type(caught.value).__name__}: {caught.value}"
        assert relay.changed == 2 * len(errors) * ROUNDS
        assert rpc_ext.statistics().destinations["w1"].in_flight == 0
        return errors

    (errors, at_caller), (_, at_callee) = world.run(be_relayed, str(tmp_path / "file"), attack)
    for what, error in errors.items():
        assert error.startswith("AuthenticationError"), error
        assert "'w1'" in error
        assert ("it is not signed" if what == "magic" else CHANGED) in error
    count = 2 * len(errors)
    if way == FROM:
        assert (at_caller, at_callee) == ({"w1": count * ROUNDS}, {})
    else:
        assert at_caller == {}
        assert at_callee == {"": 2 * ROUNDS, "w0": (count - 4) * ROUNDS, "w1": 2 * ROUNDS}


@pytest.mark.world(2, timeout=TIMEOUT)
def test_changed_remote_fails_at_caller(world: World, tmp_path: Path) -> None:
    def attack(relay: Relay, _: rpc_ext.Session) -> None:
        kept = []  # dropping a reference sends a message

        def use_refused(i: int, use: Callable[[rpc_ext.RRef[Any]], Any]) -> None:
            kept.append(rpc_ext.remote("w1", same, (MARK,), timeout=math.inf))  # may raise the error already
            wait_for(lambda: relay.changed == i + 1)
            use(kept[-1])

        uses: list[Callable[[rpc_ext.RRef[Any]], Any]] = [
            lambda made: made.to_here(timeout=math.inf),
            lambda made: made.rpc_async(timeout=math.inf).lower().wait(),
            lambda made: made.rpc_sync(timeout=math.inf).lower(),
            lambda made: made.remote(timeout=math.inf).lower().to_here(timeout=math.inf),
            lambda made: rpc_sync("w1", rpc_ext.RRef.to_here, (made, math.inf), timeout=math.inf),
        ]
        for i, use in enumerate(uses):
            relay.change_next(TO, flip(PARTS["tag"]))
            with pytest.raises(AuthenticationError, match="worker 'w1' has refused same"):
                use_refused(i, use)

    world.run(be_relayed, str(tmp_path / "file"), attack)


@pytest.mark.world(2, timeout=TIMEOUT)
def test_seal_fits_only_its_message(world: World, tmp_path: Path) -> None:
    def attack(relay: Relay, session: rpc_ext.Session) -> list[str]:
        said = []
        for way in (TO, FROM):
            kept = bytearray()

            def keep(data: bytearray, begin: int, kept: bytearray = kept) -> None:
                kept[:] = data[begin : begin + SEAL_SIZE]

            def put(data: bytearray, begin: int, kept: bytearray = kept) -> None:
                data[begin : begin + SEAL_SIZE] = kept

            relay.change_next(way, keep)
            assert rpc_sync("w1", add, (1, 2)) == 3
            relay.change_next(way, put)
            with pytest.raises((AuthenticationError, TimeoutError)) as caught:
                rpc_sync("w1", add, (1, 2), timeout=LIKELY)
            said.append(f"{type(caught.value).__name__}: {caught.value}")
            assert rpc_sync("w1", add, (1, 2)) == 3
        return said

    for i in range(ROUNDS):
        (said, at_caller), (_, at_callee) = world.run(be_relayed, str(tmp_path / f"file{i}"), attack)
        assert "it was received before" in said[0]
        assert said[1].startswith("TimeoutError")  # the reply was another call's, which had its reply before
        assert at_caller == {"w1": 1}
        assert at_callee == {"w0": 1}


@pytest.mark.world(2, timeout=TIMEOUT)
def test_repeated_message_is_taken_once(world: World, tmp_path: Path) -> None:
    """The engine of torch would run a request twice, and end the process over the second reply to one call."""
    folder = tmp_path / "made"
    times = soak_count(200)

    def attack(relay: Relay, session: rpc_ext.Session) -> None:
        count = 0
        for i in range(times):
            for way in (TO, FROM):
                gate = Gate(f"{i} {way}")
                with relay.record(way) as recorded:
                    rpc_sync("w1", Path.mkdir, (folder,))
                rpc_sync("w1", Path.rmdir, (folder,))
                held = rpc_async("w1", waits, (gate,))
                assert rpc_sync("w1", add, (1, 2)) == 3  # no message is in flight
                relay.inject(way, bytes(recorded))
                if way == TO:
                    count += 1
                    while rpc_sync("w1", refusals, ("w0",)) < count:
                        pass
                rpc_sync("w1", Gate.open, (gate,))
                held.wait(timeout=PATIENCE)
                assert rpc_sync("w1", add, (1, 2)) == 3

    (_, at_caller), (_, at_callee) = world.run(be_relayed, str(tmp_path / "file"), attack)
    assert not folder.exists()
    assert at_callee == {"w0": times}
    assert at_caller == {"w1": 2 * times}  # the replies that came twice, and those to requests that came twice


@pytest.mark.world(3, timeout=TIMEOUT)
def test_message_on_other_connection_is_refused(world: World, tmp_path: Path) -> None:
    """Even where it comes before the worker's own: it is kept from arriving, and sent by a stranger."""
    folder = tmp_path / "made"

    def run(file: str) -> Any:
        rank, seen = dist.get_rank(), dict[str, Any]()
        shown: list[Any] = [None] * 3
        if rank == 2:
            dist.all_gather_object(shown, None)
            real, recorded = shown[0]
            host, _, port = real.removeprefix("uv://").rpartition(":")
            with (
                Relay(lambda: (host, int(port))) as relay,
                tcp_only(),
                Stranger({"w1": relay.address.encode()}) as stranger,
            ):
                assert "it is not signed" in stranger.send(0, b"")
                relay.inject(TO, recorded)
                dist.barrier()
            dist.barrier()
            return None
        if rank == 1:
            with mock.patch.object(_listeners, "close", return_value=None), be_worker(1, file, None, seen):
                dist.all_gather_object(shown, None)
                while not refusals("w0"):
                    pass
                dist.barrier()
                return dict(rpc_ext.statistics().refused)
        with start_relay(seen) as relay, be_worker(0, file, relay, seen):
            with relay.record(TO) as arrived:
                rpc_sync("w1", Path.mkdir, (folder,))
            rpc_sync("w1", Path.rmdir, (folder,))
            with relay.drop(TO):
                with relay.record(TO) as recorded:
                    kept_back = rpc_async("w1", Path.mkdir, (folder,))
                    while len(recorded) < len(arrived):
                        pass
                dist.all_gather_object(shown, (seen["real"], bytes(recorded)))
                dist.barrier()
                rpc_ext.shutdown(graceful=False)
            return type(kept_back.exception(timeout=PATIENCE)).__name__

    for i in range(ROUNDS):
        _, at_callee, _ = world.run(run, str(tmp_path / f"file{i}"))
        assert not folder.exists()
        assert at_callee == {"": 1, "w0": 1}


@pytest.mark.world(2, timeout=TIMEOUT)
def test_waiting_reply_spares_other_replies(world: World, tmp_path: Path) -> None:
    """An unsigned reply claims a pending call and announces a tensor. The honest reply to that call comes before it.

    The engine of torch would end the process over the second reply to one call.
    """
    tensor = torch.full((16,), 7.0)

    def attack(relay: Relay, session: rpc_ext.Session) -> list[str]:
        with relay.record(FROM) as recorded:
            rpc_sync("w1", same, (tensor,))
        forged = bytearray(recorded)
        first, second = Gate(secrets.token_hex()), Gate(secrets.token_hex())  # the callee keeps those of other rounds
        assert rpc_sync("w1", add, (1, 2)) == 3
        with relay.record(TO) as request:
            pending = [rpc_async("w1", waits, (first,), timeout=LIKELY)]
            assert rpc_sync("w1", add, (1, 2)) == 3
        number = number_in(request, request.find(MAGIC))
        pending.append(rpc_async("w1", waits, (second, tensor), timeout=LIKELY))
        assert rpc_sync("w1", add, (1, 2)) == 3  # no message is in flight
        begin = forged.find(MAGIC)
        for at in (m.start() for m in re.finditer(re.escape(number_in(forged, begin)), bytes(forged))):
            forged[at : at + 8] = number
        forged[begin] ^= 1  # it is not signed
        with relay.record(FROM) as replies:
            relay.inject(FROM, bytes(forged))
            pending.append(rpc_async("w1", Gate.open, (first,), timeout=LIKELY))
            while replies.count(MAGIC) < 2:  # to the first call, and to the one that has opened it
                pass
        pending.append(rpc_async("w1", Gate.open, (second,), timeout=LIKELY))
        return [type(call.exception(timeout=PATIENCE)).__name__ for call in pending]

    for i in range(ROUNDS):
        (said, at_caller), _ = world.run(be_relayed, str(tmp_path / f"file{i}"), attack)
        assert set(said) <= {"NoneType", "AuthenticationError", "TimeoutError"}
        assert "AuthenticationError" in said
        assert at_caller["w1"] >= 1


def number_in(message: bytearray, begin: int) -> bytes:
    """Return the number of the call, as the seal that begins there has it."""
    return bytes(message[begin + 24 : begin + 32])


# ---- tensors


@pytest.mark.world(2, timeout=TIMEOUT)
def test_memory_beside_message_is_untouched(world: World, tmp_path: Path) -> None:
    """The description of a tensor by torch says how large its memory is; it is changed to say more than there is."""

    def attack(relay: Relay, session: rpc_ext.Session) -> list[str]:
        tensor, said = torch.zeros(0x12345), []
        for _, call in itertools.product(range(ROUNDS), (rpc_sync, rpc.rpc_sync)):
            for way in (TO, FROM):
                relay.replace_next(way, struct.pack("<ci", b"J", 0x12345), struct.pack("<ci", b"J", 1 << 20))
                with pytest.raises(RuntimeError, match="was refused") as caught:
                    call("w1", same, (tensor,))
                said.append(str(caught.value))
                assert torch.equal(call("w1", same, (tensor,)), tensor)
        assert relay.changed == len(said)
        return said

    (said, _), _ = world.run(be_relayed, str(tmp_path / "file"), attack)
    assert len(said) == 4 * ROUNDS
    assert all(CHANGED in error for error in said), said


@pytest.mark.world(2, timeout=TIMEOUT)
def test_oversized_announcement_allocates_nothing(world: World, tmp_path: Path) -> None:
    """The connection ends, and neither of the processes."""

    def attack(relay: Relay, session: rpc_ext.Session) -> None:
        content = bytes(0x12345)
        size = len(_codec.encode(_codec.PayloadKind.CALL, (0, same, (content,), {})).payload)
        relay.replace_next(TO, struct.pack("<cI", b"\x82", size), struct.pack("<cI", b"\x82", (1 << 31) - 1))
        # TensorPipe sometimes misses that a peer has closed a connection; the call then times out.
        with pytest.raises((WorkerLostError, TimeoutError)):
            rpc_sync("w1", same, (content,), timeout=LIKELY)
        assert relay.changed == 1

    for i in range(ROUNDS):
        _, (_, at_callee) = world.run(be_relayed, str(tmp_path / f"file{i}"), attack)
        assert at_callee == {"w0": 1}


NUMBERS = torch.arange(0x4711, 0x4711 + 1000)


@pytest.mark.world(2, timeout=TIMEOUT)
@pytest.mark.parametrize("seal", ["descriptions", "contents"])
def test_numbers_can_change_without_content_seal(world: World, tmp_path: Path, seal: str) -> None:
    old, new = struct.pack("<q", 0x4711 + 500), struct.pack("<q", 0)

    def attack(relay: Relay, session: rpc_ext.Session) -> list[str]:
        said = []
        for _, call in itertools.product(range(ROUNDS), (rpc_sync, rpc.rpc_sync)):
            for way in (TO, FROM):
                relay.replace_next(way, old, new)
                try:
                    said.append(str(int((call("w1", same, (NUMBERS,)) == NUMBERS).sum())))
                except RuntimeError as e:
                    said.append(str(e))
                assert torch.equal(call("w1", same, (NUMBERS,)), NUMBERS)
        assert relay.changed == len(said)
        return said

    (said, _), _ = world.run(be_relayed, str(tmp_path / "file"), attack, seal=seal)
    if seal == "descriptions":
        assert said == ["999"] * 4 * ROUNDS
    else:
        assert ["was refused: " + CHANGED in error for error in said] == [True] * 4 * ROUNDS


@pytest.mark.world(2, timeout=TIMEOUT)
def test_sparse_indices_cannot_change(world: World, tmp_path: Path) -> None:
    """A dense tensor to which it is added would be written at an address of the attacker's choice."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0x4711, 3]]), torch.ones(2), (0x5000,))

    def attack(relay: Relay, session: rpc_ext.Session) -> list[str]:
        said = []
        for _, way in itertools.product(range(ROUNDS), (TO, FROM)):
            relay.replace_next(way, struct.pack("<q", 0x4711), struct.pack("<q", 1 << 40))
            with pytest.raises(RuntimeError, match="was refused") as caught:
                rpc.rpc_sync("w1", same, (sparse,))
            said.append(str(caught.value))
            assert torch.equal(rpc.rpc_sync("w1", same, (sparse,)).to_dense(), sparse.to_dense())
        assert relay.changed == 2 * ROUNDS
        return said

    (said, _), _ = world.run(be_relayed, str(tmp_path / "file"), attack)
    assert all(CHANGED in error for error in said), said


@pytest.mark.world(2, timeout=TIMEOUT)
@pytest.mark.parametrize("way", [TO, FROM])
@pytest.mark.parametrize("which", [0, 1], ids=["one device", "the other device"])
def test_devices_of_tensor_cannot_change(world: World, tmp_path: Path, way: int, which: int) -> None:
    """A descriptor names a tensor's device at its sender and at its receiver. Unknown ones would end the process."""
    host = b"\xbd\x03cpu\0"  # as TensorPipe writes it: the length of the type, the type, the index

    def change(data: bytearray, begin: int) -> None:
        at = [m.start() for m in re.finditer(re.escape(host), bytes(data))][which]
        data[at + len(host) - 1] = 5

    def attack(relay: Relay, session: rpc_ext.Session) -> int:
        assert torch.equal(rpc_sync("w1", same, (NUMBERS,)), NUMBERS)
        relay.change_next(way, change)
        with pytest.raises((WorkerLostError, AuthenticationError, TimeoutError)):
            rpc_sync("w1", same, (NUMBERS,), timeout=LIKELY)
        return relay.changed

    for i in range(ROUNDS):
        (changed, at_caller), (_, at_callee) = world.run(be_relayed, str(tmp_path / f"file{i}"), attack)
        assert changed == 1
        assert (at_caller, at_callee) == (({}, {"w0": 1}) if way == TO else ({"w1": 1}, {}))
