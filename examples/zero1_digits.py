"""Train a small CNN with ZeRO stage 1: every rank keeps the optimizer state of its share of the parameters only.

    torchrun --standalone --nproc-per-node 2 examples/zero1_digits.py [--backend nccl] [--state disk]

With the backend nccl each rank trains on a GPU of its own. With the state on disk, Adam's state of each shard is in a
store, and in memory only while the shard is updated.

Parameters and gradients lie in flat buckets, of which each rank owns one shard. As soon as backward has filled one:

    cfd.reduce_scatter_tensor(gradients).then_async(step Adam on my shard, return cfd.all_gather_into_tensor(values))

Backward goes on meanwhile, and several buckets are in flight. The first step of the next bucket does not wait for the
second step of this one. Each layer's next forward waits for the one future that stands for the whole chain.

At the end the program trains the same model again as plain torch does it, with every gradient averaged and all of
Adam's state on every rank, and exits with an error when the two differ. The idea: Rajbhandari, Rasley, Ruwase, He,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cudafuture.distributed as cfd
from _digits import Digits, layer_groups, make_model, same_on_every_rank
from cudafuture import CUDAFuture, wait_all
from cudafuture.store import DiskStore
from cudafuture.swap import offload

WANTED_ACCURACY = 0.95
LEARNING_RATE = 4e-3
TOLERANCE = 1e-6  # of a parameter after all steps: what another order of summing may come to


class Bucket:
    """Layers whose parameters and gradients lie in two flat buffers, of which this rank owns one shard."""

    def __init__(self, layers: Collection[nn.Module], store: DiskStore | None, name: str) -> None:
        parameters = [p for layer in layers for p in layer.parameters()]
        world = dist.get_world_size()
        size = sum(p.numel() for p in parameters)
        size += -size % world  # equal shards
        device = parameters[0].device
        self.values, self.gradients = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.shard = nn.Parameter(self.values.chunk(world)[dist.get_rank()])  # a view: the optimizer writes in place
        self.shard.grad = torch.zeros_like(self.shard)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam([self.shard], LEARNING_RATE)
        if store is not None:
            self.optimizer = offload(self.optimizer, store, name=name, min_bytes=0, buffer_bytes=1 << 20)
        self.missing = self.count = len(parameters)  # gradients that backward has still to bring
        self.updated = CUDAFuture.completed(self.values)
        start = 0
        for parameter in parameters:
            part = slice(start, start + parameter.numel())
            self.values[part] = parameter.detach().flatten()
            parameter.data = self.values[part].view_as(parameter)
            parameter.grad = self.gradients[part].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
            start = part.stop
        for layer in layers:
            layer.register_forward_pre_hook(self._wait_for_update)

    def _gradient_is_there(self, _parameter: Tensor) -> None:
        self.missing -= 1
        if self.missing == 0:
            assert self.shard.grad is not None
            reduced = cfd.reduce_scatter_tensor(self.shard.grad, self.gradients)
            self.updated = reduced.then_async(self._step)
            self.missing = self.count

    def _step(self, reduced: CUDAFuture[Tensor]) -> CUDAFuture[Tensor]:
        reduced.value().div_(dist.get_world_size())
        self.optimizer.step()
        self.gradients.zero_()
        return cfd.all_gather_into_tensor(self.values, self.shard.detach())

    def _wait_for_update(self, _layer: nn.Module, _inputs: object) -> None:
        self.updated.wait(non_blocking=True)


@dataclass
class Run:
    """Results of one training."""

    model: nn.Module
    loss: float  # of the last step, on this rank
    state_bytes: int  # of the optimizer, on this rank


def train_zero1(args: argparse.Namespace, digits: Digits, store: DiskStore | None) -> tuple[Run, int]:
    """Train with sharded state; return the run, and the most buckets in flight at the end of backward."""
    torch.manual_seed(args.seed)
    model = make_model().to(digits.device)
    groups = layer_groups(model, args.bucket_kib)
    buckets = [Bucket(group.values(), store, f"bucket {i}") for i, group in enumerate(groups)]
    in_flight = 0
    for images, labels in digits.batches(args.epochs, args.batch_size, args.seed):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        in_flight = max(in_flight, sum(not bucket.updated.done() for bucket in buckets))
    wait_all([bucket.updated for bucket in buckets])
    return Run(model, loss.item(), sum(state_bytes(bucket.optimizer) for bucket in buckets)), in_flight


def train_plain(args: argparse.Namespace, digits: Digits) -> Run:
    """Train as plain torch does, from the same seed and on the same batches."""
    torch.manual_seed(args.seed)
    model = make_model().to(digits.device)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    for images, labels in digits.batches(args.epochs, args.batch_size, args.seed):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        optimizer.step()
    return Run(model, loss.item(), state_bytes(optimizer))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state, without the counters of steps."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim() > 0]
    return sum(t.nbytes for t in tensors)


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the largest difference between two parameters of the same name and place."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@dataclass
class Results:
    """Report of the program."""

    loss: float
    accuracy: float
    state_bytes: int
    full_state_bytes: int
    largest_difference: float
    most_buckets_in_flight: int
    checks: dict[str, bool]

    def __str__(self) -> str:
        share = self.state_bytes / self.full_state_bytes
        lines = [
            f"ZeRO-1 on {dist.get_world_size()} ranks: last loss {self.loss:.4f}, accuracy {self.accuracy:.3f}",
            f"optimizer state: {self.state_bytes:,} bytes per rank, {share:.1%} of the full {self.full_state_bytes:,}",
            f"in flight after backward: up to {self.most_buckets_in_flight} buckets",
            f"largest difference from plain torch: {self.largest_difference:.2g}, allowed {TOLERANCE:g}",
            *(f"{'passed' if passed else 'FAILED'}  {check}" for check, passed in self.checks.items()),
        ]
        return "\n".join(lines)


def compare(digits: Digits, zero1: Run, plain: Run, in_flight: int) -> Results:
    """Check what the program claims."""
    accuracy = digits.accuracy(zero1.model)
    difference = largest_difference(zero1.model, plain.model)
    even_share = plain.state_bytes / dist.get_world_size()
    checks = {
        "accuracy": accuracy >= WANTED_ACCURACY,
        "same on every rank": same_on_every_rank(zero1.model),
        "same as plain torch": difference <= TOLERANCE,
        "an even share of the state": zero1.state_bytes <= 1.01 * even_share,  # and the padding
    }
    return Results(zero1.loss, accuracy, zero1.state_bytes, plain.state_bytes, difference, in_flight, checks)


def arguments() -> argparse.Namespace:
    """Read the command line, and refuse to run alone."""
    parser = argparse.ArgumentParser(description="Data-parallel training with the optimizer's state in shards.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket-kib", type=int, default=64, help="a bucket is larger only when one layer is")
    parser.add_argument("--state", choices=["memory", "disk"], default="memory", help="where Adam's state is")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/zero1_digits.py")
    return args


def main() -> int:
    """Train twice, compare and report; return the number of failed checks."""
    args = arguments()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # training makes little differences grow, and in float32 soon large
    digits = Digits.load(args.seed)
    if args.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        digits = digits.to(torch.device("cuda", torch.cuda.current_device()))
    dist.init_process_group(args.backend)
    with ExitStack() as stack:
        store = None
        if args.state == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            store = stack.enter_context(DiskStore(folder))
        zero1, in_flight = train_zero1(args, digits, store)
        results = compare(digits, zero1, train_plain(args, digits), in_flight)
        if store is not None:
            results.checks["the state is on disk"] = store.statistics().used >= zero1.state_bytes
    if dist.get_rank() == 0:
        print(results, flush=True)
        if args.json:
            args.json.write_text(json.dumps(asdict(results), indent=2) + "\n")
    dist.barrier()  # a rank that fails first must not end the others before their report
    dist.destroy_process_group()
    return list(results.checks.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
