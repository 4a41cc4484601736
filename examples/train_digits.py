"""Train a small CNN on handwritten digits, data-parallel, with communication and optimizer hidden behind backward.

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py

Gradients travel in buckets. Backward fills the buckets from the last layer to the first, and as soon as one is full:

    cfd.all_reduce(bucket).then(average it, step its own optimizer)

Backward goes on meanwhile, other buckets are in flight, and the loop starts on the next batch. Each layer's forward
waits for the one future that stands for its own parameters, and for nothing else. An error anywhere on the way (a dead
peer, an exception in the optimizer) comes out of that wait.

At the end the program checks what it claims, and exits with an error when a check fails: the accuracy on images it has
not seen, the same parameters on every rank, and the same parameters as a plain loop that blocks on every all_reduce.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import cudafuture.distributed as cfd
from _digits import Digits, layer_groups, make_model, same_on_every_rank
from _timeline import Timeline, overlap_table
from cudafuture import CUDAFuture, wait_all

WANTED_ACCURACY = 0.95


class Bucket:
    """Layers whose gradients travel together: one flat buffer, one optimizer, and the future of the last update."""

    def __init__(self, index: int, layers: Mapping[str, nn.Module]) -> None:
        self.index = index
        self.layers = layers
        self.parameters = [p for layer in layers.values() for p in layer.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)
        self.gradients = torch.zeros(sum(p.numel() for p in self.parameters))
        self.missing = 0  # gradients that this backward has still to bring
        self.updated: CUDAFuture[list[nn.Parameter]] | None = None
        # Every gradient is a view of the buffer, in which backward accumulates: nothing is ever copied to be sent.
        views = torch.split(self.gradients, [p.numel() for p in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)

    @torch.no_grad()
    def update(self) -> None:
        """Make the sum of all ranks' gradients their mean, apply it, and clear the buffer for the next backward."""
        self.gradients.div_(dist.get_world_size())
        self.optimizer.step()
        self.gradients.zero_()


class Overlap:
    """Sends each bucket when backward has filled it, updates it when it comes back; its layers wait for that."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.timeline = Timeline()
        self._next = 0  # the bucket to send next: every rank has to send them in the same order
        for bucket in buckets:
            for parameter in bucket.parameters:
                hook = partial(self._gradient_is_there, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for layer in bucket.layers.values():
                layer.register_forward_pre_hook(partial(self._wait_for_update, bucket))

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients; when this returns some buckets are still in flight."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self.timeline.step += 1
        with self.timeline.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Wait for the last updates, which no forward waits for."""
        wait_all([bucket.updated for bucket in self.buckets if bucket.updated is not None])

    def report(self) -> list[dict[str, Any]]:
        """A row per bucket: what it is, and the medians of what overlapped with what."""
        return [
            {"bucket": b.index, "layers": list(b.layers), "kib": b.gradients.nbytes / 1024}
            | self.timeline.overlap(b.index)
            for b in self.buckets
        ]

    def _gradient_is_there(self, bucket: Bucket, _parameter: Tensor) -> None:
        self.timeline.look()
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._send(self.buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        reduced = cfd.all_reduce(bucket.gradients)
        self.timeline.watch("all_reduce", bucket.index, reduced)
        bucket.updated = reduced.then(partial(self._update, bucket))  # on a thread of the group's, beside backward

    def _update(self, bucket: Bucket, reduced: CUDAFuture[Tensor]) -> list[nn.Parameter]:
        reduced.value()  # raises what the all_reduce failed with
        with self.timeline.span("update", bucket.index):
            bucket.update()
        return bucket.parameters  # so that on a device whoever waits is ordered after the kernels that wrote them

    def _wait_for_update(self, bucket: Bucket, _layer: nn.Module, _inputs: Any) -> None:
        if bucket.updated is not None:
            with self.timeline.span("wait", bucket.index):
                bucket.updated.wait(non_blocking=True)


def plain_backward(buckets: Sequence[Bucket], loss: Tensor) -> None:
    """The synchronous loop that the overlapped one has to equal: backward, then bucket after bucket, blocking."""
    loss.backward()  # type: ignore[no-untyped-call]
    for bucket in buckets:
        dist.all_reduce(bucket.gradients)
        bucket.update()


def make_buckets(model: nn.Sequential, bucket_kib: int) -> list[Bucket]:
    """Make buckets of at most ``bucket_kib``, or of one layer, in the order in which backward fills them."""
    return [Bucket(index, layers) for index, layers in enumerate(layer_groups(model, bucket_kib))]


@dataclass
class Run:
    """What came out of one training."""

    model: nn.Module
    steps: int
    seconds: float
    overlap: list[dict[str, Any]]  # a row per bucket; none when nothing was meant to overlap


def train(args: argparse.Namespace, digits: Digits, *, overlapped: bool) -> Run:
    """Train a model from the seed on: both kinds of loop see the same first parameters, batches and buckets."""
    torch.manual_seed(args.seed)
    model = make_model()
    buckets = make_buckets(model, args.bucket_kib)
    overlap = Overlap(buckets) if overlapped else None
    backward: Callable[[Tensor], None] = overlap.backward if overlap else partial(plain_backward, buckets)
    batches = list(digits.batches(args.epochs, args.batch_size, args.seed))
    dist.barrier()
    start = time.perf_counter()
    for images, labels in track(batches, "overlapped " if overlap else "synchronous", disable=dist.get_rank() != 0):
        backward(nn.functional.cross_entropy(model(images), labels))
    if overlap:
        overlap.finish()
    return Run(model, len(batches), time.perf_counter() - start, overlap.report() if overlap else [])


def differing(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Name the parameters that are not equal to the last bit."""
    other = dict(theirs.named_parameters())
    return [name for name, parameter in ours.named_parameters() if not torch.equal(parameter, other[name])]


def show(results: Mapping[str, Any]) -> None:
    """Print how long it took, what overlapped with what, and the outcome of every check."""
    console = Console()
    console.print(overlap_table(results["overlap"]))
    for loop, seconds in results["seconds"].items():
        console.print(f"{loop} loop: {seconds:.2f} s for {results['steps']} steps")
    console.print(f"accuracy on new images: {results['accuracy']:.3f}, wanted {WANTED_ACCURACY}")
    for check, passed in results["checks"].items():
        console.print(f"[green]passed[/]  {check}" if passed else f"[bold red]FAILED[/]  {check}")


def arguments() -> argparse.Namespace:
    """Read the command line, and refuse to run alone."""
    parser = argparse.ArgumentParser(description="Data-parallel training whose communication hides behind backward.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket-kib", type=int, default=64, help="a bucket is larger only when one layer is")
    parser.add_argument("--no-compare", action="store_true", help="do not train again with the synchronous loop")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/train_digits.py")
    return args


def main() -> int:
    """Train, check, report; the number of checks that failed."""
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    digits = Digits.load(args.seed)
    run = train(args, digits, overlapped=True)
    seconds = {"overlapped": run.seconds}
    accuracy = digits.accuracy(run.model)
    checks = {"accuracy": accuracy >= WANTED_ACCURACY, "same on every rank": same_on_every_rank(run.model)}
    if not args.no_compare:
        plain = train(args, digits, overlapped=False)
        seconds["synchronous"] = plain.seconds
        checks["same as the synchronous loop"] = not differing(run.model, plain.model)
    results = {"steps": run.steps, "seconds": seconds, "accuracy": accuracy, "checks": checks, "overlap": run.overlap}
    if dist.get_rank() == 0:
        show(results)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")
    dist.barrier()  # whoever fails first must not take the others' report with it
    dist.destroy_process_group()
    return list(checks.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
