"""Decode chats whose KV cache does not fit: blocks are written out when they are evicted, and read ahead of their use.

    torchrun --standalone --nproc-per-node 2 examples/kv_cache_offload.py --folder /mnt/nvme

Rank 0 decodes, once with its own disk (``DiskStore``) and once with that of rank 1 (``RemoteStore``), which only
serves. Started by plain ``python`` it does the first alone.

As in paged attention, keys and values lie in blocks of 16 tokens in a pool, and each sequence has a table of its
blocks; chats share those of the system prompt that they begin with. Before a chat's turn all its blocks have to be in
the pool. Those that are missing take the place of the least recently used, and nothing waits but futures:

    gather(the evicted block's write.released, the wanted block's last write).then_async(read it into that place)

That begins a turn ahead, while attention of the present turn is computed. A block that has not changed since it was
written or read is not written again.

The program decodes the same chats with all blocks in memory, too, and exits with an error when an answer differs by a
bit. The model is a toy whose layers all attend side by side; a block's size is that of 16 tokens in so many layers. The
idea: Kwon and others, "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import rich.box
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import rpc_ext
from cudafuture import CUDAFuture, gather, wait_all
from cudafuture.store import DiskStore

T = TypeVar("T")

TOKENS = 16  # of a block
HEADS, DIM = 4, 64  # of a layer
WIDTH = HEADS * DIM
LAYER_KIB = 2 * TOKENS * WIDTH * 4 // 1024  # keys and values of a block, in float32
PREFIXES = 3  # system prompts
PREFIX, CONTEXT = 6, 20  # blocks of each, and the most that a chat may have
DECODED = 4  # tokens of an answer
PAGE = 4096
STORAGE = "storage"


def blocks_of(tokens: int) -> int:
    """Return the number of blocks that so many tokens take."""
    return -(-tokens // TOKENS)


@dataclass
class Turn:
    """Prompt of a chat, and its answer."""

    table: tuple[int, ...]  # the chat's blocks, with those that the turn adds
    before: int  # tokens that are there already
    prompt: int
    answer: int
    ended: tuple[int, ...] = ()  # blocks that are no longer needed

    @property
    def past(self) -> tuple[int, ...]:
        """The blocks that are there already."""
        return self.table[: blocks_of(self.before)]

    @property
    def after(self) -> int:
        """Tokens that are there in the end."""
        return self.before + self.prompt + self.answer


def chats(args: argparse.Namespace) -> list[Turn]:
    """Yield turns of chats, some far more frequent than others. A chat that is too long starts again."""
    draw, numbers = torch.Generator().manual_seed(args.seed), itertools.count()
    prefixes = [tuple(next(numbers) for _ in range(PREFIX)) for _ in range(PREFIXES)]
    turns = [Turn(prefix, 0, PREFIX * TOKENS, 0) for prefix in prefixes]
    zipf = 1 / torch.arange(1, args.chats + 1)
    last: dict[int, Turn] = {}
    for chat in torch.multinomial(zipf, args.turns, replacement=True, generator=draw).tolist():
        prompt = int(torch.randint(8, 41, (), generator=draw))
        so_far = last.get(chat, turns[chat % PREFIXES])
        if blocks_of(so_far.after + prompt + DECODED) > CONTEXT:
            so_far.ended = so_far.table[PREFIX:]
            so_far = turns[chat % PREFIXES]
        new = tuple(next(numbers) for _ in range(len(so_far.table), blocks_of(so_far.after + prompt + DECODED)))
        last[chat] = Turn(so_far.table + new, so_far.after, prompt, DECODED)
        turns.append(last[chat])
    return turns


class Model:
    """Attention with random weights, whose output is the next token's input."""

    def __init__(self, layers: int, seed: int) -> None:
        self.layers = layers
        draw = torch.Generator().manual_seed(seed)
        self.projections = torch.randn(3, 1, WIDTH, WIDTH, generator=draw) / math.sqrt(WIDTH)
        self.gains = torch.rand(3, layers, 1, WIDTH, generator=draw)  # all in which layers differ

    def step(self, x: Tensor, cache: Tensor, at: int) -> Tensor:
        """Put keys and values of tokens (n x WIDTH) into the cache, and return what comes after each."""
        n, end = len(x), at + len(x)
        q, k, v = (x @ self.projections * self.gains).view(3, self.layers, n, HEADS, DIM).transpose(2, 3)
        cache[0, :, :, at:end], cache[1, :, :, at:end] = k, v
        causal = torch.ones(n, end, dtype=torch.bool).tril(at)
        out = functional.scaled_dot_product_attention(q, cache[0, :, :, :end], cache[1, :, :, :end], attn_mask=causal)
        return functional.layer_norm(out.mean(0).transpose(0, 1).reshape(n, WIDTH), (WIDTH,))


class Memory:
    """A cache that never evicts."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}

    def expect(self, turns: Sequence[Turn]) -> None:
        """Do nothing: all blocks are in memory."""

    def get(self, block: int) -> Tensor:
        """Return what was put."""
        return self.blocks[block]

    def put(self, block: int, content: Tensor) -> None:
        """Keep a copy."""
        self.blocks.setdefault(block, torch.empty_like(content)).copy_(content)

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop them."""
        for block in blocks:
            del self.blocks[block]


@dataclass
class Counts:
    """Counts of a pool: blocks, and seconds."""

    in_pool: int = 0  # wanted by a turn, and not gone since the last one that wanted them
    in_time: int = 0  # of those that were read: there when they were needed
    written: int = 0
    unchanged: int = 0  # evicted without being written again
    read: int = 0
    waited: float = 0.0
    busy: float = 0.0  # while a read or write was in flight


@dataclass
class Slot:
    """A place in the pool, for one block."""

    index: int
    ready: CUDAFuture[Any]  # the block is there, or may be put there
    was_read: bool = False  # since it was last wanted
    is_dirty: bool = False


class Pool:
    """A cache of so many blocks; the others are in a store."""

    def __init__(self, store: DiskStore | rpc_ext.RemoteStore, count: int, shape: tuple[int, ...]) -> None:
        self.store, self.counts = store, Counts()
        self.memory = pages(count, shape)
        self.free = list(range(count))
        self.slots: OrderedDict[int, Slot] = OrderedDict()  # by block, the least recently used first
        self.held: set[int] = set()  # blocks that must stay: of the turns that are expected
        self.writes: dict[int, CUDAFuture[int]] = {}  # the last one of each block that was ever written
        self.ended: list[CUDAFuture[Any]] = []  # writes and deletions of blocks that are forgotten
        self.spans: list[CUDAFuture[tuple[float, float]]] = []  # when reads and writes were in flight

    def expect(self, turns: Sequence[Turn]) -> None:
        """Begin to read what a turn will want, and those after it."""
        self.held = {block for turn in turns for block in turn.table}
        for i, turn in enumerate(turns):
            for block in turn.table if i == 0 else turn.past:
                if block in self.slots:
                    self.slots.move_to_end(block)
                elif block in self.writes:
                    self.slots[block] = self.read(block)
                elif i == 0:  # it is new; those of the other turns come when it is theirs
                    self.slots[block] = Slot(*self.room())

    def read(self, block: int) -> Slot:
        """Begin to read a block into a slot that another one may still have to be written from."""
        index, vacated = self.room()

        def begin(done: CUDAFuture[Any]) -> CUDAFuture[Tensor]:
            done.value()  # raises what the disk has to say
            return self.track(self.store.read(str(block), self.memory[index]))

        self.counts.read += 1
        return Slot(index, gather(vacated, self.writes[block]).then_async(begin), was_read=True)

    def room(self) -> tuple[int, CUDAFuture[Any]]:
        """Return a place, and the future of its being free; evict a block where there is none."""
        if self.free:
            return self.free.pop(), CUDAFuture.completed(None)
        block = next(block for block in self.slots if block not in self.held)
        slot = self.slots.pop(block)
        if not slot.is_dirty:
            self.counts.unchanged += 1
            return slot.index, slot.ready
        return slot.index, self.write(block, self.memory[slot.index])

    def write(self, block: int, content: Tensor) -> CUDAFuture[Any]:
        """Begin to write a block; return the future of its memory being free."""
        self.counts.written += 1
        write = self.writes[block] = self.track(self.store.write(str(block), content))
        return write.released or write

    def track(self, future: CUDAFuture[T]) -> CUDAFuture[T]:
        """Record the time in which a transfer was in flight."""
        begin = time.perf_counter()
        self.spans.append(future.then(lambda _: (begin, time.perf_counter())))
        return future

    def get(self, block: int) -> Tensor:
        """Wait for a block, and return the pool's memory that it is in."""
        slot = self.slots[block]
        self.counts.in_pool += not slot.was_read
        self.counts.in_time += slot.was_read and slot.ready.done()
        slot.was_read = False
        self.wait(slot)
        return self.memory[slot.index]

    def put(self, block: int, content: Tensor) -> None:
        """Replace what is in a block; it will have to be written."""
        slot = self.slots[block]
        self.wait(slot)
        self.memory[slot.index].copy_(content)
        slot.is_dirty = True

    def wait(self, slot: Slot) -> None:
        """Wait for a slot, and count the time."""
        begin = time.perf_counter()
        slot.ready.wait()
        self.counts.waited += time.perf_counter() - begin

    def forget(self, blocks: Iterable[int]) -> None:
        """Free their places, here and in the store."""
        for block in blocks:
            self.free.append(self.slots.pop(block).index)
            if block in self.writes:  # a write in flight is no matter: the last request wins
                self.ended += [self.writes.pop(block), self.store.delete(str(block))]

    def finish(self) -> None:
        """Wait for the reads and writes in flight; raise their first error."""
        wait_all([*self.writes.values(), *self.ended])
        end = 0.0
        for span in sorted(wait_all(self.spans)):
            self.counts.busy += max(0.0, span[1] - max(span[0], end))
            end = max(end, span[1])


def pages(count: int, shape: tuple[int, ...]) -> Tensor:
    """Return memory for blocks that lies on whole pages: disks read and write there without a copy in between."""
    nbytes = count * math.prod(shape) * 4
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + nbytes].view(torch.float32).view(count, *shape)


def decode(turns: Sequence[Turn], cache: Memory | Pool, model: Model, ahead: int) -> list[Tensor]:
    """Return the last token of each answer."""
    answers = []
    gathered = torch.zeros(2, model.layers, HEADS, CONTEXT * TOKENS, DIM)  # the blocks of a sequence, in order
    blocks = torch.split(gathered, TOKENS, dim=3)
    for i, turn in enumerate(turns):
        cache.expect(turns[i : i + 1 + ahead])
        for block, content in zip(turn.past, blocks, strict=False):
            content.copy_(cache.get(block))
        x = torch.randn(turn.prompt, WIDTH, generator=torch.Generator().manual_seed(i))
        x = model.step(x, gathered, turn.before)
        for at in range(turn.before + turn.prompt, turn.after):
            x = model.step(x[-1:], gathered, at)
        for n in range(turn.before // TOKENS, len(turn.table)):
            cache.put(turn.table[n], blocks[n])
        cache.forget(turn.ended)
        answers.append(x[-1])
    return answers


@dataclass
class Run:
    """Results of decoding with one size of blocks, and one store."""

    block_kib: int
    store: str
    counts: Counts  # of the pool
    seconds: float
    seconds_in_memory: float

    def row(self) -> list[str]:
        """Return what the table says."""
        c = self.counts
        ratios = [f"{c.in_pool / (c.in_pool + c.read):.1%}", f"{c.in_time / max(1, c.read):.1%}"]
        speed = (c.written + c.read) * self.block_kib * 1024 / 1e6 / max(c.busy, 1e-9)
        numbers = [f"{n:.0f}" for n in (c.written, c.unchanged, c.read, speed)]
        times = [f"{seconds:.2f} s" for seconds in (c.waited, self.seconds, self.seconds_in_memory)]
        return [f"{self.block_kib} KiB", self.store, *ratios, *numbers, *times]


Stores = dict[str, Callable[[], DiskStore | rpc_ext.RemoteStore]]


def compare(args: argparse.Namespace, stores: Stores) -> tuple[list[Run], dict[str, bool]]:
    """Decode in memory and with each store, for each size of blocks; return the runs and the checks by name."""
    turns, runs, checks = chats(args), [], {}
    for kib in args.block_kib:
        model = Model(kib // LAYER_KIB, args.seed)
        begin = time.perf_counter()
        expected = decode(turns, Memory(), model, 0)
        in_memory = time.perf_counter() - begin
        for name, store_of in stores.items():
            with store_of() as store:
                pool = Pool(store, args.pool, (2, model.layers, HEADS, TOKENS, DIM))
                begin = time.perf_counter()
                answers = decode(turns, pool, model, args.ahead)
                pool.finish()
                runs.append(Run(kib, name, pool.counts, time.perf_counter() - begin, in_memory))
            checks[f"{kib} KiB, {name}: same as without eviction"] = all(map(torch.equal, answers, expected))
            checks[f"{kib} KiB, {name}: blocks went and came back"] = pool.counts.written > 0 and pool.counts.read > 0
    return runs, checks


def report(args: argparse.Namespace, stores: Stores) -> int:
    """Print and write the results; return the number of failed checks."""
    runs, checks = compare(args, stores)
    title = f"{args.turns} turns of {args.chats} chats, a pool of {args.pool} blocks, read ahead by {args.ahead}"
    table = Table("block", "store", title=title, box=rich.box.SIMPLE_HEAD, collapse_padding=True)
    for heading in ("in pool", "ahead", "written", "unchanged", "read", "MB/s", "waited", "total", "in memory"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(*run.row())
    Console(width=max(100, Console().width)).print(table)
    for check, passed in checks.items():
        print("passed" if passed else "FAILED", check, sep="  ", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"runs": [asdict(run) for run in runs], "checks": checks}, indent=2) + "\n")
    return list(checks.values()).count(False)


def arguments() -> argparse.Namespace:
    """Read the command line, and refuse what cannot be."""
    parser = argparse.ArgumentParser(description="A KV cache on disk, here and on another worker.")
    parser.add_argument("--folder", default="kv-cache", help="where the stores are to be")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 512, 2048], help=f"multiples of {LAYER_KIB}")
    parser.add_argument("--pool", type=int, default=48, help="blocks in memory")
    parser.add_argument("--ahead", type=int, default=1, help="turns whose blocks are read ahead")
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--turns", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if args.pool < (1 + args.ahead) * CONTEXT:
        parser.error(f"--pool: {(1 + args.ahead) * CONTEXT} blocks at least, for {1 + args.ahead} chats at a time")
    if any(kib < LAYER_KIB or kib % LAYER_KIB for kib in args.block_kib):
        parser.error(f"--block-kib: pass a multiple of {LAYER_KIB}")
    if dist.is_torchelastic_launched() and os.environ["WORLD_SIZE"] != "2":
        parser.error("it needs two processes: one decodes, one serves")
    return args


def main() -> int:
    """Decode or serve, by the rank; return the number of failed checks."""
    args = arguments()
    torch.set_num_threads(1)
    stores: Stores = {"local": lambda: DiskStore(args.folder)}
    if not dist.is_torchelastic_launched():
        return report(args, stores)
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # both ranks are here: no other host needs to reach them
    if os.environ["RANK"] == "1":
        with rpc_ext.serve_store(args.folder), rpc_ext.init_rpc(STORAGE, transports=["uv"]):
            rpc_ext.shutdown(timeout=math.inf)  # comes back when rank 0 needs it no more
        return 0
    with rpc_ext.init_rpc("decoder", transports=["uv"]):
        return report(args, {**stores, "remote": lambda: rpc_ext.RemoteStore(STORAGE)})


if __name__ == "__main__":
    sys.exit(main())
