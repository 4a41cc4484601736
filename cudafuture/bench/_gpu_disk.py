"""Rows of a GPU: optimizer state outside its memory, and files to and from its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from cudafuture.bench._gpu import IS_FAKE, MIB, Medians, against, expect_equal, medians, sync
from cudafuture.bench._rows import Row, Skipped, disk_folder
from cudafuture.errors import StorageError
from cudafuture.io import BACKENDS, File
from cudafuture.swap import offload

# ---- swapping

SHAPES = [(256, 256)] * 4 if IS_FAKE else [(4096, 4096)] * 4  # 67 M parameters, 0.5 GB of Adam's state
OPTIONS: dict[str, Any] = {"min_bytes": 1 << 12, "chunk_bytes": 1 << 16} if IS_FAKE else {}
STATE = sum(2 * 4 * rows * columns for rows, columns in SHAPES)  # bytes
CHECKED_STEPS = 2


def wave(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Return numbers that are the same each time, also on fake devices."""
    count = shape[0] * shape[1]
    numbers = torch.arange(count, device="cuda", dtype=torch.float32)
    return numbers.remainder_(8191).add_(1 + seed).sin_().view(shape)


class Training:
    """Parameters whose optimizer keeps its state in one place, and the device memory that they take."""

    def __init__(self, make: Callable[[list[torch.nn.Parameter]], Any], gradients: list[torch.Tensor]) -> None:
        sync()
        before = torch.cuda.memory_allocated()
        self.gradients = gradients
        self.parameters = [torch.nn.Parameter(wave(shape, i)) for i, shape in enumerate(SHAPES)]
        self.optimizer = make(self.parameters)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(CHECKED_STEPS):
            self.step()
        sync()
        self.peak = torch.cuda.max_memory_allocated() - before

    def step(self) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def expect_same(self, other: Training, what: str) -> None:
        """Raise unless the parameters are those of the other training, bit for bit."""
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            expect_equal(mine.detach(), theirs.detach(), what)


@contextmanager
def state_in_a_file(where: Path) -> Iterator[Callable[[], Any]]:
    """Give a function that reads and writes the bytes of the state, between a file and the device."""
    state = torch.zeros(STATE, dtype=torch.uint8, device="cuda")
    with File(where, "w+") as file:
        file.write(state).wait()

        def move() -> None:
            file.read(state).wait()
            file.write(state).wait()

        yield move


@cache
def swapping(rounds: int) -> tuple[Medians, dict[str, int]]:
    """Measure steps of Adam with its state in several places; return also the peak of the device memory of each."""
    gradients = [wave(shape, 100 + i) for i, shape in enumerate(SHAPES)]
    with disk_folder() as place, ExitStack() as stack:

        def make_offload(name: str, **options: Any) -> Callable[[list[torch.nn.Parameter]], Any]:
            def make(parameters: list[torch.nn.Parameter]) -> Any:
                adam = torch.optim.Adam(parameters, foreach=False)
                return stack.enter_context(offload(adam, place / name, **OPTIONS, **options))

            return make

        kinds: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
            "gpu": partial(torch.optim.Adam, foreach=False),
            "gpu_fused": partial(torch.optim.Adam, fused=not IS_FAKE),
            "disk": make_offload("disk"),
            "disk_cpu": make_offload("disk_cpu", compute="cpu"),
            "host": make_offload("host", memory=1 << 40),
        }
        trainings = {name: Training(make, gradients) for name, make in kinds.items()}
        for name in ("disk", "host"):
            trainings[name].expect_same(trainings["gpu"], f"parameters after {CHECKED_STEPS} steps, state on {name}")
        file = stack.enter_context(state_in_a_file(place / "alone"))
        pinned = torch.zeros(STATE, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(STATE, dtype=torch.uint8, device="cuda")

        def copies() -> None:
            there.copy_(pinned, non_blocking=True)
            pinned.copy_(there, non_blocking=True)

        steps: dict[str, Callable[[], Any]] = {name: training.step for name, training in trainings.items()}
        took = medians(min(rounds, 3), **steps, file_alone=file, copies_alone=copies)
        for name in ("disk", "host"):
            trainings[name].expect_same(trainings["gpu"], f"parameters after all steps, state on {name}")
        return took, {name: training.peak for name, training in trainings.items()}


def step(kind: str, peer: str, limit: float, rounds: int) -> Row:
    """Compare a step with moving the bytes of the state alone, to the device and back."""
    took, _ = swapping(rounds)
    what = f"a step of Adam with {STATE / MIB:,.0f} MiB of state, state on {kind}"
    return against(f"swapping-{kind}", what, took, kind, peer, limit)


def peak(kind: str, limit: float, rounds: int) -> Row:
    """Measure the peak of the device memory, with the parameters and without the gradients."""
    _, peaks = swapping(rounds)
    us, them = peaks[kind] / MIB, peaks["gpu"] / MIB
    what = f"peak of the device memory of parameters and optimizer, state on {kind}"
    return Row(f"swapping-memory-{kind}", what, "MiB", us, them, "state on the GPU", "x", us / them, limit)


# ---- storing

BYTES = (4 if IS_FAKE else 256) * MIB
PIECE = min(BYTES, 64 * MIB)  # that a peer moves at once
BACKEND = {backend.name: backend for backend in BACKENDS}


class ByHand:
    """Peer that moves a tensor through pinned memory and the page cache, with Python's own files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pinned = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self.view = self.pinned.numpy().data

    def read(self, tensor: torch.Tensor) -> None:
        with self.path.open("rb", buffering=0) as file:
            for at in range(0, BYTES, PIECE):
                file.readinto(self.view)
                tensor[at : at + PIECE].copy_(self.pinned)

    def write(self, tensor: torch.Tensor) -> None:
        with self.path.open("r+b", buffering=0) as file:
            for at in range(0, BYTES, PIECE):
                self.pinned.copy_(tensor[at : at + PIECE])
                file.write(self.view)


@contextmanager
def open_backend(backend: str, path: Path, *, direct: bool) -> Iterator[File]:
    """Give a file of a backend, or raise Skipped with the reason why there is none."""
    if reason := BACKEND[backend].why_not():
        raise Skipped(reason)
    if direct and not hasattr(os, "O_DIRECT"):
        raise Skipped("this system has no O_DIRECT")
    try:
        file = BACKEND[backend].open(path, "w+", direct=direct)
    except (StorageError, OSError) as e:
        raise Skipped(str(e)) from e
    with file:
        yield file


@cache
def moving(backend: str, direct: bool, rounds: int) -> Medians:
    """Write a tensor of the device to a file and read it, beside the peers of the same file."""
    source = torch.randint(0, 256, (BYTES,), dtype=torch.uint8, device="cuda")
    target, host = torch.zeros_like(source), torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True)
    with disk_folder() as place, open_backend(backend, place / "file", direct=direct) as file:
        file.write(source).wait()
        file.read(target).wait()
        expect_equal(target, source, "what a file returned to the device")
        file.read(host).wait()
        expect_equal(host, source, "what a file returned to the host")
        each: dict[str, Callable[[], Any]] = {
            "write": lambda: file.write(source).wait(),
            "read": lambda: file.read(target).wait(),
            "host_write": lambda: file.write(host).wait(),
            "host_read": lambda: file.read(host).wait(),
        }
        if not direct:
            by_hand = ByHand(place / "file")
            by_hand.read(target.zero_())
            expect_equal(target, source, "what the peer read")
            each |= {"write_by_hand": lambda: by_hand.write(source), "read_by_hand": lambda: by_hand.read(target)}
        return medians(min(rounds, 3), **each)


def storing(backend: str, way: str, direct: bool, rounds: int) -> Row:
    """Measure a write or read of device memory: direct beside pinned memory, cached beside a loop by hand."""
    took = moving(backend, direct, rounds)
    peer = f"host_{way}" if direct else f"{way}_by_hand"
    how = "direct" if direct else "cached"
    what = f"{way} {BYTES / MIB:,.0f} MiB of device memory, {backend}, {how}, {BYTES / took[way]:.2f} GB/s"
    few = {name: took[name] for name in (way, peer, f"host_{way}")}
    return against(f"storing-{way}-{backend}-{how}", what, few, way, peer, 1.3 if direct else 1.1)


def gds(rounds: int) -> Row:
    """Compare a read by KvikIO with one by threads through pinned memory."""
    if IS_FAKE:
        raise Skipped("KvikIO needs the driver of a GPU")
    if reason := BACKEND["gds"].why_not():
        raise Skipped(reason)
    source = torch.randint(0, 256, (BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    with disk_folder() as place, open_backend("threads", place / "file", direct=False) as threads:
        threads.write(source).wait()
        threads.sync().wait()
        with BACKEND["gds"].open(place / "file", "r") as file:
            file.read(target).wait()
            expect_equal(target, source, "what KvikIO read")
            took = medians(
                min(rounds, 3), gds=lambda: file.read(target).wait(), threads=lambda: threads.read(target).wait()
            )
    what = f"read {BYTES / MIB:,.0f} MiB to device memory with KvikIO, {BYTES / took['gds']:.2f} GB/s"
    return against("storing-read-gds", what, took, "gds", "threads", 1.2)


ROWS: dict[str, Callable[[int], Row]] = {
    f"storing-{way}-{backend}-{how}": partial(storing, backend, way, how == "direct")
    for backend in ("io_uring", "threads")
    for how in ("direct", "cached")
    for way in ("write", "read")
}
ROWS["storing-read-gds"] = gds
PEERS = {"disk": ("file_alone", 1.5), "disk_cpu": ("file_alone", 2.0), "host": ("copies_alone", 2.0)}
ROWS |= {f"swapping-{kind}": partial(step, kind, peer, limit) for kind, (peer, limit) in PEERS.items()}
ROWS |= {f"swapping-memory-{kind}": partial(peak, kind, 0.75) for kind in ("disk", "host")}
