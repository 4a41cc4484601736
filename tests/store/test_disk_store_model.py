"""A store compared with a dict while I/Os fail, end early and complete late: no wrong byte, no lost extent."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudafuture import CUDAFuture, wait
from cudafuture.errors import NotFoundError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.soak import soak_count

KEYS = "abcdef"
SIZES = [0, 1, 60, 64, 1000, 1024, 4096, 5000, 32767, 32768, 70000, 200000]  # float32s

pytestmark = [pytest.mark.xdist_group("disk-store-model"), pytest.mark.usefixtures("on_the_host")]

ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(["write", "atomic"]),
        st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(SIZES)), min_size=1),
    ),
    st.tuples(st.just("read"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)),
    st.tuples(st.just("delete"), st.sampled_from(KEYS)),
    st.tuples(st.just("link"), st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS))),
)
ROUNDS = st.lists(st.lists(ACTIONS, min_size=1, max_size=6), min_size=1, max_size=8)
RATES = st.sampled_from([0.0, 0.0, 0.05, 0.3])
ENGINES = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["auto", "threads"]),
        "queue_depth": st.sampled_from([1, 8]),
        "threads": st.sampled_from([1, 4]),
        "max_pending": st.sampled_from([None, 1]),
        "_faults": st.fixed_dictionaries(
            {
                "seed": st.integers(0, 1 << 30),
                **dict.fromkeys(("io_error", "no_space", "again", "interrupted", "cut_short", "late"), RATES),
            }
        ),
    }
)
STORES = st.fixed_dictionaries(
    {
        "durable": st.booleans(),
        "checksum": st.booleans(),
        "direct": st.sampled_from(["auto", False]),
        "capacity": st.sampled_from([None, 3 << 20]),
    }
)


class Model:
    """The expected content of each key: None if it has no tensor, else the version that fills the tensor."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.held: dict[str, tuple[int, int] | None] = dict.fromkeys(KEYS)
        self.version = 0
        self.tensors: list[torch.Tensor] = []  # of pending writes

    def run(self, actions: list[Any]) -> None:
        """Start all actions at once, and check their outcomes."""
        may_be: dict[str, set[tuple[int, int] | None]] = {key: {held} for key, held in self.held.items()}
        outcomes: list[tuple[CUDAFuture[Any], Any]] = []
        changing: set[str] = set()
        for verb, what in actions:
            if verb in ("write", "atomic"):
                self.version += 1
                versions = {key: (self.version * 1000 + i, size) for i, (key, size) in enumerate(what)}
                for key, version in versions.items():
                    may_be[key].add(version)
                changing |= versions.keys()
                made = {key: torch.full((size,), float(number)) for key, (number, size) in versions.items()}
                if verb == "atomic":
                    outcomes.append((self.store.writev(made, atomic=True), versions))
                    continue
                # One by one: of a call for many that fails it is not known which of them did.
                outcomes += [(self.store.write(key, tensor), (key, versions[key])) for key, tensor in made.items()]
            elif verb == "read":
                outcomes.append((self.store.readv(what), what))
            elif verb == "link":
                key, to = what
                if to not in changing:  # else it could get the old tensor or the new one
                    may_be[key].add(self.held[to])
                    changing.add(key)
                    outcomes.append((self.store.link({key: to}), (key, self.held[to])))
            else:
                changing.add(what)
                may_be[what].add(None)
                outcomes.append((self.store.delete(what), what))
        wait([future for future, _ in outcomes], timeout=PATIENCE)
        for future, what in outcomes:
            self.check(future, what, may_be)

    def check(self, future: CUDAFuture[Any], what: Any, may_be: dict[str, set[tuple[int, int] | None]]) -> None:
        error = future.exception(timeout=0)
        if isinstance(error, StorageError):
            assert error.errno in {errno.EIO, errno.ENOSPC, errno.EDQUOT}, error
        if isinstance(what, dict):
            if error is None:  # else no key has changed
                self.held |= what
        elif isinstance(what, tuple):
            key, version = what
            assert (version is None) == isinstance(error, NotFoundError)
            if error is None:
                self.held[key] = version
        elif isinstance(what, str):
            if error is None:
                self.held[what] = None
        elif isinstance(error, NotFoundError):
            assert any(None in may_be[key] for key in what)
        elif error is None:
            for key, tensor in zip(what, future.value(), strict=True):
                numbers = set(tensor.unique().tolist())
                assert any(v is not None and v[1] == tensor.numel() and numbers <= {v[0]} for v in may_be[key]), key

    def compare(self) -> None:
        """Check that the store has the expected tensors, and no other extent."""
        there = {key for key, held in self.held.items() if held is not None}
        assert set(self.store.keys()) == there
        s = self.store.statistics()
        kept = [held for held in self.held.values() if held is not None]
        assert s.bytes == sum(4 * size for _, size in kept)
        assert s.used == sum(4 * size for _, size in {*kept})  # links have the bytes of what they are to
        assert s.pending == s.checksum_errors == 0

    def take_all(self) -> None:
        """Read the expected tensors, delete them, and check that the store is empty."""
        kept = {key: held for key, held in self.held.items() if held is not None}
        for (number, size), got in zip(kept.values(), self.store.readv(kept).wait(timeout=PATIENCE), strict=True):
            assert torch.equal(got, torch.full((size,), float(number)))
        self.store.deletev(kept).wait(timeout=PATIENCE)
        self.store.trim()
        assert (self.store.statistics().used, self.store.statistics().slab_bytes) == (0, 0)


@settings(max_examples=soak_count(2000), deadline=None)
@given(rounds=ROUNDS, engine_options=ENGINES, options=STORES)
def test_store_behaves_like_dict(
    rounds: list[list[Any]], engine_options: dict[str, Any], options: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with (
            Engine(block_size=1 << 18, **engine_options) as engine,
            DiskStore(folder, engine=engine, **options) as store,
        ):
            model = Model(store)
            for actions in rounds:
                model.run(actions)
                model.compare()
        if options["durable"]:
            with Engine(block_size=1 << 18) as engine, DiskStore(folder, engine=engine, **options) as store:
                model.store = store
                model.compare()
                model.take_all()
