"""Rows of a GPU: copies, packed copies, prefetching and NCCL."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture.bench._gpu import IS_FAKE, MIB, Medians, against, expect, expect_equal, medians, sync
from cudafuture.bench._rows import Row, Skipped
from cudafuture.future import copy
from cudafuture.prefetch import prefetch

# ---- copies

SIZES = (64, 1024) if IS_FAKE else (64, 1024, 16 * 1024, 256 * 1024)  # KiB


@cache
def copying(kib: int, rounds: int) -> Medians:
    """Copy in both directions, from pageable and pinned memory."""
    host = torch.randint(0, 256, (kib * 1024,), dtype=torch.uint8)
    pinned, there = host.pin_memory(), host.cuda()
    back = torch.empty_like(host, pin_memory=True)
    expect_equal(copy(host, "cuda").wait(), host, "a copy from pageable memory")
    expect_equal(copy(pinned, "cuda").wait(), host, "a copy from pinned memory")
    expect_equal(copy(there, "cpu").wait(), host, "a copy to the host")
    return medians(
        rounds,
        pageable=lambda: copy(host, "cuda").wait(),
        to_pageable=lambda: host.to("cuda", non_blocking=True),
        pinned=lambda: copy(pinned, "cuda").wait(),
        to_pinned=lambda: pinned.to("cuda", non_blocking=True),
        back=lambda: copy(there, "cpu").wait(),
        to_cpu=lambda: there.to("cpu"),
        copy_pinned=lambda: back.copy_(there, non_blocking=True),
    )


WAYS = {  # our name, torch's, and what it is
    "pageable": ("pageable", "to_pageable", "from pageable memory to the device"),
    "pinned": ("pinned", "to_pinned", "from pinned memory to the device"),
    "back": ("back", "copy_pinned", "from the device to the host"),
}
# Up to 1 MiB the host's calls are most of it; the figures beyond are bandwidth.
COPY_LIMITS = {64: 3.0, 1024: 2.0, 16 * 1024: 1.15, 256 * 1024: 1.05}


def copies(way: str, kib: int, rounds: int) -> Row:
    """Compare the time of a copy with torch's."""
    took = copying(kib, rounds)
    ours, peer, words = WAYS[way]
    rates = {name: kib * 1024 / took[name] for name in (ours, peer)}
    what = f"copy {kib:,} KiB {words}, {rates[ours]:.1f} GB/s, torch {rates[peer]:.1f}"
    few = {name: took[name] for name in (ours, peer)}
    return against(f"copies-{way}-{kib}KiB", what, few, ours, peer, COPY_LIMITS[kib])


# ---- packing

PACKS = ((64, 1024),) if IS_FAKE else ((512, 1024), (64, 1 << 16), (2048, 256))  # tensors, floats of each


def packing(count: int, floats: int, rounds: int) -> Row:
    """Compare a packed copy of many tensors with a copy of each by torch."""
    host = [torch.randn(floats) for _ in range(count)]
    packed = copy(host, "cuda", pack=True).wait()
    expect(all(torch.equal(a.cpu(), b) for a, b in zip(packed, host, strict=True)), "packed tensors")
    took = medians(
        rounds,
        packed=lambda: copy(host, "cuda", pack=True).wait(),
        unpacked=lambda: copy(host, "cuda").wait(),
        to_each=lambda: [x.to("cuda", non_blocking=True) for x in host],
        pin_and_to_each=lambda: [x.pin_memory().to("cuda", non_blocking=True) for x in host],
    )
    what = f"copy(pack=True) of {count:,} tensors of {4 * floats:,} bytes"
    return against(f"packing-{count}x{4 * floats}", what, took, "packed", "to_each", 0.5)


# ---- prefetching

BATCH, BATCHES, SIDE = (8, 6, 32) if IS_FAKE else (256, 30, 224)
MATRIX, PRODUCTS = (64, 1) if IS_FAKE else (8192, 3)  # whose products take about as long as a copy


class Images:
    """Loader that gives a fresh pageable batch each time, as a DataLoader without workers does."""

    def __init__(self) -> None:
        shape = (BATCH, 3, SIDE, SIDE)
        self.batches = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(4)]
        self.labels = torch.arange(BATCH)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((self.batches[i % 4].clone(), self.labels) for i in range(BATCHES))

    def __len__(self) -> int:
        return BATCHES


class Epochs:
    """Epochs of images that are normalised on the device, and matrix products for each batch."""

    def __init__(self) -> None:
        self.images = Images()
        self.matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
        self.mean, self.deviation = (torch.full((1, 3, 1, 1), v, device="cuda") for v in (127.0, 58.0))

    def normalise(self, batch: Any) -> Any:
        return batch[0].float().sub_(self.mean).div_(self.deviation), batch[1]

    def compute(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.matrix, self.matrix)

    def consume(self, batches: Any) -> torch.Tensor:
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        for x, _ in batches:
            total += x.double().mean()
            self.compute()
        return total

    def plain(self) -> torch.Tensor:
        there = ((x.to("cuda", non_blocking=True), y.to("cuda")) for x, y in self.images)
        return self.consume(map(self.normalise, there))

    def ours(self, depth: int = 2) -> torch.Tensor:
        return self.consume(prefetch(self.images, "cuda", transform=self.normalise, depth=depth))

    def timm(self) -> torch.Tensor:
        """Consume the batches of PrefetchLoader.__iter__, of timm's data/loader.py after its pull request 2784."""

        def batches() -> Iterator[Any]:
            stream, batch = torch.cuda.Stream(), None
            for x, y in self.images:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    copied = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
                    copied = self.normalise(copied)
                if batch is not None:
                    yield batch
                torch.cuda.current_stream().wait_stream(stream)
                for tensor in copied:
                    tensor.record_stream(torch.cuda.current_stream())
                batch = copied
            yield batch

        return self.consume(batches())

    def load(self) -> None:
        for _ in self.images:
            pass

    def compute_all(self) -> None:
        for _ in range(BATCHES):
            self.compute()


@cache
def prefetching(rounds: int) -> Medians:
    """Measure epochs of each prefetcher, and the parts of an epoch alone."""
    epochs = Epochs()
    each: dict[str, Callable[[], Any]] = {"plain": epochs.plain, "prefetch": epochs.ours, "timm": epochs.timm}
    each["depth_4"] = partial(epochs.ours, 4)
    plain = float(epochs.plain())
    for name, call in each.items():
        expect(abs(float(call()) - plain) < 1e-3, f"the mean of all batches with {name}")
    return medians(min(rounds, 5), **each, computing=epochs.compute_all, loading=epochs.load)


def prefetch_beside(peer: str, limit: float, rounds: int) -> Row:
    """Compare the time of an epoch with a peer's, or with the longest of its parts."""
    took = prefetching(rounds)
    if peer == "bound":
        took = took | {"bound": max(took["computing"], took["loading"])}
    what = f"an epoch of {BATCHES} batches of {BATCH * 3 * SIDE * SIDE / MIB:.0f} MiB, prefetched"
    return against(f"prefetching-{peer}", what, took, "prefetch", peer, limit)


def overlap(_rounds: int) -> Row:
    """Return the share of the copies' time in which no kernel ran, from torch's profiler."""
    epochs = Epochs()
    expect(abs(float(epochs.ours()) - float(epochs.plain())) < 1e-3, "the mean of all batches")
    if IS_FAKE:
        raise Skipped("fake devices have no profile")
    with torch.profiler.profile() as profiler:
        epochs.ours()
        sync()
    copies, kernels = list[tuple[float, float]](), list[tuple[float, float]]()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range.start, event.time_range.end
            if "HtoD" in event.name:
                copies.append(span)
            elif "Mem" not in event.name:
                kernels.append(span)
    total = sum(end - begin for begin, end in copies)
    expect(total > 0, "the profiler saw no copy")
    covered = sum(max(0.0, min(e, end) - max(b, begin)) for b, e in copies for begin, end in kernels)
    alone = max(0.0, 1 - covered / total)
    what = "share of the time of copies in which no kernel ran (copies in us, kernels as the peer)"
    kernels_us = sum(end - begin for begin, end in kernels)
    return Row("prefetching-overlap", what, "us", total, kernels_us, "kernels", "alone", alone, 0.2)


# ---- collectives

FLOATS = (8,) if IS_FAKE else (8, MIB, 64 * MIB)
CALLS = 20


@cache
def nccl() -> None:
    """Make a process group of NCCL of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


def collectives(floats: int, rounds: int) -> Row:
    """Compare twenty all_reduces and their waits with torch's own."""
    nccl()
    x = torch.ones(floats, device="cuda")

    def ours() -> None:
        for _ in range(CALLS):
            cfd.all_reduce(x).wait(non_blocking=True)

    def torchs() -> None:
        for _ in range(CALLS):
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()

    ours()
    expect_equal(x, torch.ones(floats), "all_reduce of one rank")
    took = medians(rounds, ours=ours, torch=torchs)
    what = f"{CALLS} all_reduces of {floats:,} floats on NCCL, one rank"
    return against(f"collectives-{floats}", what, took, "ours", "torch", 1.3 if floats < MIB else 1.1)


ROWS: dict[str, Callable[[int], Row]] = {
    f"copies-{way}-{kib}KiB": partial(copies, way, kib) for kib in SIZES for way in WAYS
}
ROWS |= {f"packing-{count}x{4 * floats}": partial(packing, count, floats) for count, floats in PACKS}
BESIDE = {"plain": 1.0, "timm": 1.05, "bound": 1.25}
ROWS |= {f"prefetching-{peer}": partial(prefetch_beside, peer, limit) for peer, limit in BESIDE.items()}
ROWS["prefetching-overlap"] = overlap
ROWS |= {f"collectives-{floats}": partial(collectives, floats) for floats in FLOATS}
