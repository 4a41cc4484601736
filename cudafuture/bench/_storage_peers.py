"""Peers of the storage benchmark: DeepSpeed's aio_handle, NIXL, TensorNVMe, threads on the page cache, and fio.

Each peer is used as its own project uses it, from memory that it need not copy, and its data are read back before it
is measured. Peers that are not installed are skipped; docs/benchmarks.md says how to install them.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cudafuture.bench._rows import Skipped

now = time.perf_counter_ns
MIB = 1 << 20
PAGE = 4096


@dataclass(frozen=True)
class TensorSet:
    """So many tensors of so many bytes; a turn is some passes over all of them."""

    count: int
    size: int
    passes: int  # a gibibyte in all, where that does not take a peer minutes: fio counts milliseconds

    @property
    def total(self) -> int:
        return self.count * self.size

    @property
    def read_order(self) -> list[int]:
        """Small ones are not read in the order in which they were written."""
        several = range(self.count)
        return list(several) if self.size >= MIB else random.Random(0).sample(several, self.count)

    def tensors(self, align: int = 0) -> list[torch.Tensor]:
        """Return tensors as torch makes them, or in one piece of memory that begins at a multiple of `align`."""
        if not align:
            return [torch.full((self.size,), value(i), dtype=torch.uint8) for i in range(self.count)]
        memory = torch.empty(self.total + align, dtype=torch.uint8)
        begin = -memory.data_ptr() % align
        return self.cut(memory[begin : begin + self.total])

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        cut = list(memory.view(self.count, self.size))
        for i, tensor in enumerate(cut):
            tensor.fill_(value(i))
        return cut


SHAPES = {
    "8x128MiB": TensorSet(8, 128 * MIB, 1),
    "512x1MiB": TensorSet(512, MIB, 2),
    "4096x64KiB": TensorSet(4096, MIB // 16, 4),
    "65536x4KiB": TensorSet(65536, PAGE, 1),
}


def value(index: int) -> int:
    return index % 251 + 1


class Contender:
    """Contender that writes all tensors of a shape, and reads them back into the same memory."""

    label: str

    def __init__(self, shape: TensorSet, tensors: Sequence[torch.Tensor]) -> None:
        self.shape, self.tensors, self.order = shape, tensors, shape.read_order

    def write(self) -> None:
        raise NotImplementedError

    def read(self) -> None:
        raise NotImplementedError

    def label_for(self, _direction: str) -> str:
        """Return the label, with the best settings found."""
        return self.label

    def ready(self, direction: str) -> None:
        """Prepare a transfer in `direction`, without being measured."""

    def close(self) -> None:
        """Give back what is not memory."""

    def prove(self) -> None:
        """Write everything twice, so that overwriting is measured, and check that it can be read."""
        for _ in range(2):
            self.ready("write")
            self.write()
        for tensor in self.tensors:
            tensor.zero_()
        self.ready("read")
        self.read()
        for i, tensor in enumerate(self.tensors):
            if not int(tensor[0]) == int(tensor[-1]) == value(i):
                raise RuntimeError(f"{self.label} did not read tensor {i} as it was written")


@dataclass
class Turn:
    """One contender's turn in one direction: nanoseconds for each pass; and the processor time of all its threads."""

    contender: Contender
    direction: str
    cpu: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        took = cpu = 0
        for _ in range(self.contender.shape.passes):
            self.contender.ready(self.direction)
            os.sync()  # no contender pays for the dirty pages of others
            began, start = time.process_time_ns(), now()
            getattr(self.contender, self.direction)()
            took, cpu = took + now() - start, cpu + time.process_time_ns() - began
        self.cpu.append(cpu / self.contender.shape.passes)
        return took / self.contender.shape.passes


# ---- fio


@dataclass
class Fio:
    """One job of fio, on a file that was written before; at the block size and queue depth that are fastest here."""

    file: Path
    direction: str
    shape: TensorSet
    blocks: Sequence[int] = (MIB // 4, MIB // 2, MIB)
    depths: Sequence[int] = (4, 16, 64)

    def __post_init__(self) -> None:
        self.run("write", MIB, 8)  # the file has its blocks
        choices = itertools.product(self.blocks, self.depths)
        self.block, self.depth = min(choices, key=lambda choice: min(self.run(self.direction, *choice) for _ in "12"))
        self.label = f"fio {self.block >> 10}K x{self.depth}"

    def run(self, direction: str, block: int, depth: int, huge_pages: bool = False) -> float:
        """Return the nanoseconds of a pass."""
        os.sync()
        job = fio_job(
            self.file, direction, f"--size={self.shape.total}", f"--loops={self.shape.passes}", f"--bs={block}",
            f"--iodepth={depth}", "--ioengine=io_uring", "--gtod_reduce=1", huge_pages=huge_pages,
        )  # fmt: skip
        return float(job["io_bytes"] / job["bw_bytes"] * 1e9) / self.shape.passes

    def __call__(self) -> float:
        return self.run(self.direction, self.block, self.depth)

    def with_huge_pages(self) -> float:
        """Return the same with memory that a disk can fetch in fewer pieces, faster on many; fio has no option."""
        return self.run(self.direction, self.block, self.depth, huge_pages=True)


def fio_job(file: Path, direction: str, *options: str, huge_pages: bool = False) -> dict[str, Any]:
    """Run fio past the page cache, and return what it says of its job."""
    command = ["fio", "--name=peer", f"--filename={file}", f"--rw={direction}", "--direct=1", "--overwrite=1", *options]
    variables = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {})
    done = subprocess.run([*command, "--output-format=json"], env=variables, check=True, capture_output=True, text=True)
    job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]["read" if "read" in direction else "write"]
    return job


# ---- past the page cache


@cache
def async_io() -> Any:
    """Return DeepSpeed's native part, compiled at first use."""
    return importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)


class DeepSpeed(Contender):
    """A file for each tensor by aio_handle, from memory that it has pinned, as the optimizer's swapper does it."""

    label = "DeepSpeed"
    TRIED = ((8, 1), (32, 1), (128, 1), (32, 2), (128, 2))  # queue depth, threads to an operation; 8 and 1 are its own
    OPEN = 512  # a file is open from its request until wait()

    def __init__(self, folder: Path, shape: TensorSet) -> None:
        folder.mkdir()
        self.pinning = self.handle(*self.TRIED[0])
        self.memory = self.pinning.new_cpu_locked_tensor(shape.total, torch.empty(0, dtype=torch.uint8))
        super().__init__(shape, shape.cut(self.memory))
        self.paths = [str(folder / f"{i}.tensor.swp") for i in range(shape.count)]
        some = max(shape.count // 8, 8)
        self.settings: dict[str, tuple[int, int]] = {}
        self.handles: dict[str, Any] = {}
        for direction in ("write", "read"):
            self.settings[direction] = min(self.TRIED, key=lambda tried: self.trial(direction, tried, some))
            self.handles[direction] = self.handle(*self.settings[direction])

    def label_for(self, direction: str) -> str:
        depth, parallel = self.settings[direction]
        return f"{self.label} x{depth}/{parallel}"

    @staticmethod
    def handle(depth: int, parallel: int) -> Any:
        return async_io().aio_handle(MIB, depth, False, True, parallel)  # block size; single_submit, overlap_events

    def trial(self, direction: str, tried: tuple[int, int], some: int) -> float:
        handle, took = self.handle(*tried), []
        for _ in range(3):  # the first makes the files
            start = now()
            self.swap(direction, handle, range(some))
            took.append(now() - start)
        return min(took[1:])

    def swap(self, direction: str, handle: Any, order: Sequence[int]) -> None:
        submit = handle.async_pwrite if direction == "write" else handle.async_pread
        for begin in range(0, len(order), self.OPEN):
            for i in order[begin : begin + self.OPEN]:
                if submit(self.tensors[i], self.paths[i], 0) != 0:
                    raise OSError(f"DeepSpeed did not {direction} {self.paths[i]}")
            handle.wait()

    def write(self) -> None:
        self.swap("write", self.handles["write"], range(self.shape.count))

    def read(self) -> None:
        self.swap("read", self.handles["read"], self.order)

    def close(self) -> None:
        self.tensors = ()
        self.pinning.free_cpu_locked_tensor(self.memory)
        del self.memory


@cache
def nixl_agent() -> Any:
    api = importlib.import_module("nixl._api")
    agent = api.nixl_agent("benchmark", api.nixl_agent_config(backends=[]))
    agent.create_backend("POSIX", {"use_uring": "true"})
    return agent


class Nixl(Contender):
    """NIXL's POSIX plugin on io_uring: one transfer of all tensors, prepared before, in pieces of a mebibyte."""

    label = "NIXL"

    def __init__(self, folder: Path, shape: TensorSet) -> None:
        super().__init__(shape, shape.tensors(align=PAGE))
        agent, piece = nixl_agent(), min(shape.size, MIB)
        folder.mkdir()
        self.file = os.open(folder / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.file, 0, shape.total)
        self.begin = self.tensors[0].data_ptr()
        self.registered = [
            agent.register_memory([(self.begin, shape.total, 0, "")], "DRAM"),
            agent.register_memory([(0, shape.total, self.file, "")], "FILE"),
        ]
        self.handles = {}
        for operation, order in (("WRITE", range(shape.count)), ("READ", self.order)):
            at = [i * shape.size + offset for i in order for offset in range(0, shape.size, piece)]
            memory = agent.get_xfer_descs([(self.begin + a, piece, 0) for a in at], "DRAM")
            pieces = agent.get_xfer_descs([(a, piece, self.file) for a in at], "FILE")
            self.handles[operation] = agent.initialize_xfer(operation, memory, pieces, "benchmark")

    def transfer(self, operation: str) -> None:
        handle = self.handles[operation]
        state = nixl_agent().transfer(handle)
        while state == "PROC":
            state = nixl_agent().check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"NIXL's transfer is {state}")

    def write(self) -> None:
        self.transfer("WRITE")

    def read(self) -> None:
        self.transfer("READ")

    def close(self) -> None:
        for handle in self.handles.values():
            nixl_agent().release_xfer_handle(handle)
        for registered in self.registered:
            nixl_agent().deregister_memory(registered)
        os.close(self.file)


# ---- through the page cache


class TensorNVMe(Contender):
    """The native half of TensorNVMe's DiskOffloader, which neither frees nor allocates the tensors' memory."""

    label = "TensorNVMe"

    def __init__(self, folder: Path, shape: TensorSet) -> None:
        super().__init__(shape, shape.tensors())
        folder.mkdir()
        self.native = importlib.import_module("tensornvme._C").DiskStore(str(folder / "file"), 128, "uring")
        self.keys = [str(i) for i in range(shape.count)]
        self.written = False

    def ready(self, direction: str) -> None:
        """Write the tensors again before a read, which removes them, and remove them before a write."""
        if direction == "write" and self.written:
            self.read()
        elif direction == "read" and not self.written:
            self.write()

    def write(self) -> None:
        for key, tensor in zip(self.keys, self.tensors, strict=True):
            self.native.async_write(tensor, key)
        self.native.synchronize()
        self.written = True

    def read(self) -> None:
        for i in self.order:
            self.native.async_read(self.tensors[i], self.keys[i])
        self.native.synchronize()
        self.written = False

    def close(self) -> None:
        del self.native


class FileThreads(Contender):
    """Threads that write and read whole tensors with pwrite and preadv, each its share."""

    label = "4 threads"
    THREADS = 4

    def __init__(self, folder: Path, shape: TensorSet) -> None:
        super().__init__(shape, shape.tensors())
        self.pool = ThreadPoolExecutor(self.THREADS)
        folder.mkdir()
        self.file = os.open(folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
        self.views = [tensor.numpy().data for tensor in self.tensors]

    def share(self, one: Callable[[int], int], order: Sequence[int]) -> None:
        def work(mine: Sequence[int]) -> None:
            for i in mine:
                if one(i) != self.shape.size:
                    raise OSError(f"tensor {i} was cut short")

        list(self.pool.map(work, [order[i :: self.THREADS] for i in range(self.THREADS)]))

    def write(self) -> None:
        self.share(lambda i: os.pwrite(self.file, self.views[i], i * self.shape.size), range(self.shape.count))

    def read(self) -> None:
        self.share(lambda i: os.preadv(self.file, [self.views[i]], i * self.shape.size), self.order)

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.file)


# ---- who is here

LOADED: dict[type[Contender], tuple[str, Callable[[], Any]]] = {
    DeepSpeed: ("deepspeed", async_io),
    Nixl: ("nixl", nixl_agent),
    TensorNVMe: ("tensornvme", lambda: importlib.import_module("tensornvme._C")),
    FileThreads: ("threads", lambda: None),
}


@cache
def missing(peer: type[Contender]) -> str:
    """Return why a peer cannot be measured, or nothing when it can."""
    name, load = LOADED[peer]
    try:
        load()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{name} is not here ({lines[-1]}); docs/benchmarks.md says how to install it"
    return ""


def need(peer: Any) -> None:
    """Raise unless a peer can be measured."""
    if why := missing(peer):
        raise Skipped(why)


def need_fio() -> None:
    """Raise unless fio is installed."""
    if shutil.which("fio") is None:
        raise Skipped("the peer is fio, which is not installed: apt-get install fio")
