"""A training job with a worker that only stores: the trainers keep their optimizer's state there between two steps.

    torchrun --standalone --nproc-per-node 3 examples/storage_node.py --folder /mnt/nvme

The last rank serves the folder (``serve_store``), and its main thread just waits for the others' end. All other ranks
train a small CNN, data-parallel, in buckets. As soon as backward has filled the gradients of one:

    cfd.all_reduce(gradients).then_async(the state that was read ahead).then(step Adam, write the state)

The state is read when the layers' next forward begins, after its write and beside the computing; nothing waits for it
but that chain. The trainers have a process group of their own, which the storage node need not know of.

Each trainer makes every step a second time with the state in memory. In the end parameters and states have to be the
same to the bit; else the program exits with an error. Ctrl-C ends it early, with the same checks: trainers agree on
their last step, and the storage node serves until they have ended (only torchrun itself then tells of an error). The
idea of states that are elsewhere: Rajbhandari and others, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme
Scale Deep Learning", SC 2021.

With --secret-file the workers prove to each other that they know what is in that file, and sign every call; make one
with: (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > rpc-secret). Without it, ranks that are all
on one machine talk over its loopback interface, which only its own users reach.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich.box
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cudafuture.distributed as cfd
import rpc_ext
from _digits import Digits, layer_groups, make_model, same_on_every_rank
from cudafuture import CUDAFuture, wait_all
from cudafuture.config import config

STORAGE = "storage"
STATES = ("exp_avg", "exp_avg_sq")  # Adam's state of each parameter
LEARNING_RATE = 4e-3
WANTED_ACCURACY = 0.9


class Stop:
    """Ctrl-C: the first asks for an end, the next one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a worker has failed: leave in order

    def __call__(self, *_: object) -> None:
        """Record the request to end."""
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Memory:
    """Store in the memory of this process, with the methods of RemoteStore that this program needs."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def writev(self, tensors: Mapping[str, Tensor]) -> CUDAFuture[int]:
        """Keep them."""
        self.tensors.update(tensors)
        return CUDAFuture.completed(sum(tensor.nbytes for tensor in tensors.values()))

    def readv(self, keys: Iterable[str]) -> CUDAFuture[list[Tensor]]:
        """Give them back."""
        return CUDAFuture.completed([self.tensors[key] for key in keys])


class Bucket:
    """Layers whose gradients travel together, and whose state is somewhere else between two steps."""

    def __init__(self, number: int, layers: Collection[nn.Module], states: Memory | rpc_ext.RemoteStore) -> None:
        parameters = [p for layer in layers for p in layer.parameters()]
        self.states, self.keys = states, [f"{name} of bucket {number}" for name in STATES]
        self.values = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
        self.values.grad = torch.zeros_like(self.values)
        self.optimizer = torch.optim.Adam([self.values], LEARNING_RATE)
        self.optimizer.state[self.values] = {"step": torch.tensor(0.0)}
        self.written = states.writev({key: torch.zeros_like(self.values).detach() for key in self.keys})
        self.state: CUDAFuture[list[Tensor]] | None = None  # while it is here, or on its way
        self.updated = CUDAFuture.completed(None)
        self.waited = 0.0  # seconds
        self.missing = self.count = len(parameters)  # gradients that backward has still to bring
        sizes = [p.numel() for p in parameters]
        values, gradients = torch.split(self.values.detach(), sizes), torch.split(self.values.grad, sizes)
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.data, parameter.grad = value.view_as(parameter), gradient.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
        for layer in layers:
            layer.register_forward_pre_hook(self._forward_begins)

    def _forward_begins(self, _layer: nn.Module, _inputs: object) -> None:
        begin = time.perf_counter()
        self.updated.wait(non_blocking=True)
        self.waited += time.perf_counter() - begin
        if self.state is None and torch.is_grad_enabled():
            self.state = self.written.then_async(self._read)

    def _read(self, written: CUDAFuture[int]) -> CUDAFuture[list[Tensor]]:
        written.value()  # raises what the write has failed with
        return self.states.readv(self.keys)

    def _gradient_is_there(self, _parameter: Tensor) -> None:
        self.missing -= 1
        if self.missing == 0:
            assert self.values.grad is not None
            self.updated = cfd.all_reduce(self.values.grad).then_async(self._state).then(self._step)
            self.missing = self.count

    def _state(self, reduced: CUDAFuture[Tensor]) -> CUDAFuture[list[Tensor]]:
        reduced.value()
        assert self.state is not None
        return self.state

    def _step(self, read: CUDAFuture[list[Tensor]]) -> None:
        state = self.optimizer.state[self.values]
        state.update(zip(STATES, read.value(), strict=True))
        assert self.values.grad is not None
        self.values.grad.div_(dist.get_world_size())
        self.optimizer.step()
        self.values.grad.zero_()
        self.written = self.states.writev({key: state.pop(name) for key, name in zip(self.keys, STATES, strict=True)})
        self.state = None


class Training:
    """A model, and where the states of its optimizers are."""

    def __init__(self, args: argparse.Namespace, states: Memory | rpc_ext.RemoteStore) -> None:
        torch.manual_seed(args.seed)
        self.model = make_model()
        groups = layer_groups(self.model, args.bucket_kib)
        self.buckets = [Bucket(number, group.values(), states) for number, group in enumerate(groups)]
        self.seconds = 0.0

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch."""
        begin = time.perf_counter()
        nn.functional.cross_entropy(self.model(images), labels).backward()
        self.seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Wait until all is updated, and all states are written."""
        begin = time.perf_counter()
        wait_all([bucket.updated for bucket in self.buckets])
        wait_all([bucket.written for bucket in self.buckets])
        self.seconds += time.perf_counter() - begin

    def waiting_time(self) -> float:
        """Return the seconds in which forward waited for the last step."""
        return sum(bucket.waited for bucket in self.buckets)

    def states(self) -> list[Tensor]:
        """Get all states from where they are."""
        return [state for bucket in self.buckets for state in bucket.states.readv(bucket.keys).wait()]


@dataclass
class Trained:
    """Report of a trainer."""

    steps: int
    state_bytes: int
    seconds: float
    seconds_in_memory: float
    waited: float
    waited_in_memory: float
    checks: dict[str, bool]


def train(args: argparse.Namespace, states: rpc_ext.RemoteStore, stop: Stop) -> Trained:
    """Train with the states on the storage node, and in memory; compare."""
    digits = Digits.load(args.seed)
    remote, memory = Training(args, states), Training(args, Memory())
    steps = 0
    for images, labels in digits.batches(args.steps, args.batch_size, args.seed):
        stop_count = torch.tensor(int(stop.asked or steps == args.steps))
        if cfd.all_reduce(stop_count).wait():
            break
        for training in (remote, memory):
            training.step(images, labels)
        steps += 1
        if steps == 1 and dist.get_rank() == 0:
            print("training; Ctrl-C ends it early", flush=True)
    for training in (remote, memory):
        training.finish()
    mine, theirs = remote.states(), memory.states()
    pairs = zip(remote.model.parameters(), memory.model.parameters(), strict=True)
    checks = {
        "same parameters as in memory": all(torch.equal(a, b) for a, b in pairs),
        "same states as in memory": all(map(torch.equal, mine, theirs)),
        "same on every rank": same_on_every_rank(remote.model),
    }
    if steps == args.steps:
        checks["accuracy"] = digits.accuracy(remote.model) >= WANTED_ACCURACY
    nbytes = sum(state.nbytes for state in mine)
    return Trained(steps, nbytes, remote.seconds, memory.seconds, remote.waiting_time(), memory.waiting_time(), checks)


def report(args: argparse.Namespace, everyones: list[Trained]) -> int:
    """Print the results on the first trainer; return the number of failed checks."""
    names = list(everyones[0].checks)
    checks = {name: all(trained.checks[name] for trained in everyones) for name in names}
    if dist.get_rank() != 0:
        return list(checks.values()).count(False)
    signed = args.secret_file is not None or config.rpc_secret_file is not None
    table = plain_table(f"calls are {'signed' if signed else 'not signed, no secret is set'}", "trainer", "steps")
    for heading in ("state", "on the node", "waited", "in memory", "waited"):
        table.add_column(heading, justify="right")
    for rank, t in enumerate(everyones):
        times = (t.seconds, t.waited, t.seconds_in_memory, t.waited_in_memory)
        row = (f"trainer{rank}", str(t.steps), f"{t.state_bytes / 1e6:.2f} MB")
        table.add_row(*row, *(f"{seconds:.2f} s" for seconds in times))
    Console().print(table)
    for check, passed in checks.items():
        print("passed" if passed else "FAILED", check, sep="  ", flush=True)
    if args.json:
        trainers = [asdict(trained) for trained in everyones]
        args.json.write_text(json.dumps({"signed": signed, "trainers": trainers, "checks": checks}, indent=2) + "\n")
    return list(checks.values()).count(False)


def plain_table(title: str, *headings: str) -> Table:
    """Return a table without a frame."""
    return Table(*headings, title=title, box=rich.box.SIMPLE_HEAD, collapse_padding=True)


def serve(args: argparse.Namespace) -> None:
    """Serve until all others have ended, and print the statistics."""
    with rpc_ext.serve_store(args.folder) as service:  # before RPC begins: who finds this worker finds it
        begin = time.perf_counter()
        try:
            with begin_rpc(STORAGE, args):
                rpc_ext.shutdown(timeout=math.inf)
        finally:
            seconds = time.perf_counter() - begin
            s, store = service.statistics(), service.store.statistics()
            rows = {
                "folder": service.store.dir,
                "served": f"{seconds:.1f} s",
                "written": f"{s.bytes_written / 1e6:.1f} MB",
                "read": f"{s.bytes_read / 1e6:.1f} MB",
                "requests": f"{s.requests}, refused {s.refused}",
                "most in flight": f"{s.most_in_flight / 1e6:.2f} MB",
                "latency": f"p50 {s.latency_p50 * 1e3:.2f} ms, p99 {s.latency_p99 * 1e3:.2f} ms",
                "on disk": f"{store.keys} tensors, {store.bytes / 1e6:.2f} MB",
                "checksum errors": str(store.checksum_errors),
            }
            table = plain_table("the storage node")
            table.show_header = False
            for row in rows.items():
                table.add_row(*row)
            Console().print(table)


def begin_rpc(name: str, args: argparse.Namespace) -> rpc_ext.Session:
    """Begin RPC, with signed calls where there is a secret."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # all ranks are here: no other host needs to reach them
    secret = args.secret_file.read_text() if args.secret_file else None
    return rpc_ext.init_rpc(name, secret=secret, transports=["uv"])  # which leaves the cores to training


def arguments() -> argparse.Namespace:
    """Read the command line, and refuse to run without trainers."""
    parser = argparse.ArgumentParser(description="Training with the optimizer's state on a storage node.")
    parser.add_argument("--folder", default="storage-node", help="that the last rank serves")
    parser.add_argument("--secret-file", type=Path, metavar="PATH", help="sign all calls with what is in this file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="images per trainer and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket-kib", type=int, default=64, help="a bucket is larger only when one layer is")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        parser.error("start it with: torchrun --standalone --nproc-per-node 3 examples/storage_node.py")
    return args


def main() -> int:
    """Train or serve, by the rank; return the number of failed checks."""
    args, stop = arguments(), Stop()
    torch.set_num_threads(1)
    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if rank == trainers:
        serve(args)
        return 0
    dist.init_process_group("gloo", rank=rank, world_size=trainers)
    with begin_rpc(f"trainer{rank}", args) as session:
        with rpc_ext.RemoteStore(STORAGE, namespace=session.name) as states:
            trained = train(args, states, stop)
        everyones: list[Any] = [None] * trainers
        cfd.all_gather_object(everyones, trained).wait()
        failed = report(args, everyones)
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
