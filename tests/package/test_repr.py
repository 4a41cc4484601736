"""The texts that show the objects of the library."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import torch

import cudafuture
import rpc_ext
from cudafuture.pipeline import Workers
from cudafuture.prefetch import prefetch
from cudafuture.store import DiskStore
from cudafuture.testing import World

# Protocols, decorators, and what has no state to show.
PLAIN = {"Store", "Link", "LocalLink", "DeviceLike", "pop", "stash", "Task", "Digest", "Hold", "CudaHold"}
PLAIN |= {"Timed", "Timers"}
# Of other libraries, whose objects look the same.
COMPAT = {"OptimizerSwapper", "AsyncFileWriter", "DiskOffloader", "SkipTracker", "SkipLayout"}


def public_classes() -> set[type]:
    found = set()
    for root in (cudafuture, rpc_ext):
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if any(part.startswith("_") for part in module.name.split(".")):
                continue
            try:
                names = vars(importlib.import_module(module.name))
            except ImportError:  # of a library that is not installed
                continue
            public = [names[name] for name in names.get("__all__", ())]
            found |= {one for one in public if inspect.isclass(one) and not issubclass(one, BaseException)}
    return found


def test_every_public_class_has_a_repr_of_its_own() -> None:
    anonymous = {one.__name__ for one in public_classes() if inspect.getattr_static(one, "__repr__") is object.__repr__}
    assert anonymous <= PLAIN | COMPAT


def test_world_names_ranks_and_backend() -> None:
    assert repr(World(2, timeout=5)) == "<World of 2 ranks over gloo, 5 s for each run>"


def test_prefetcher_names_iterable_and_epoch() -> None:
    batches = prefetch(["a", "b"], "cpu")
    assert repr(batches) == "<Prefetcher of a list for cpu, not reading, 0 batches so far>"
    epoch = iter(batches)
    assert next(epoch) == "a"
    assert repr(batches) == "<Prefetcher of a list for cpu, reading epoch 0, 1 batches so far>"
    batches.close()


def test_workers_count_their_tasks() -> None:
    with Workers(["cpu"]) as workers:
        assert repr(workers) == "<Workers for cpu: 0 tasks running, 0 waiting>"


def test_multipart_write_names_its_store(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        write = store.begin_write("key", torch.float32, [4])
        assert repr(write) == f"<MultipartWrite of 16 bytes to {store!r}>"


def test_session_counts_its_calls() -> None:
    with rpc_ext.init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0") as session:
        assert repr(session) == "<Session of 'me', worker 0 of 1, no call in flight>"
