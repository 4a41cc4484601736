"""Train a small CNN on handwritten digits, data-parallel, with Adam's state on another worker's disk.

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py

Gradients travel in buckets. Backward fills the buckets from the last layer to the first. Each bucket has Adam, whose
state lies on the disk of the next worker between the steps. It is read ahead, by signed calls, while forward and
backward compute. As soon as a bucket is full:

    gather(cfd.all_reduce(bucket), the state that was read) -> average it, step its own Adam -> write the state

Backward goes on meanwhile, other buckets are in flight, and the loop starts on the next batch. Each layer's forward
waits for the one future that stands for its own parameters, and for nothing else; the writes end behind it. An error
anywhere on the way (a dead peer, an exception in the optimizer, a write that fails) comes out of that wait.

The program trains twice more, with blocking calls: with the state on the same disk, and with the state in memory. The
first comparison shows what overlap gains, the second what the disk costs.

The first training is traced. At the end the program prints where the time of its steps went: what was in flight, how
much of that was overlapped, and the longest waits; with ``--trace FOLDER`` the traces of all ranks stay there, for
``cudafuture trace plot FOLDER steps.html``. Then it prints the time of each training. It checks what it claims, and
exits with an error when a check fails: the accuracy on images it has not seen, the same parameters on every rank, and
the same parameters and Adam's state as with blocking calls. With ``--state memory`` the state does not leave memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from _buckets import Bucket, Overlap, blocking_step
from _digits import Digits, layer_groups, make_model, same_on_every_rank
from _remote_state import (
    Disk,
    differing_states,
    next_workers_disk,
    read_states,
    write_first,
)
from cudafuture import trace, wait_all
from cudafuture.config import config

LOOPS = {
    "overlapped": "overlapped, Adam's state on the disk of the other worker",
    "blocking": "blocking calls, Adam's state on the same disk",
    "overlapped in memory": "overlapped, Adam's state in memory",
    "blocking in memory": "blocking calls, Adam's state in memory",
}
DISK = "Adam's state on a disk: {mib_written:.0f} MiB written, {mib_read:.0f} MiB read, {refused} calls refused"
WANTED_ACCURACY = 0.95


def make_buckets(model: nn.Sequential, bucket_kib: int) -> list[Bucket]:
    """Make buckets of at most ``bucket_kib``, or of one layer, in the order in which backward fills them."""
    return [Bucket(index, layers) for index, layers in enumerate(layer_groups(model, bucket_kib))]


@dataclass
class Run:
    """Results of one training."""

    name: str  # of the loop, in LOOPS
    model: nn.Module
    buckets: Sequence[Bucket]
    steps: int
    seconds: float


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return nn.functional.cross_entropy(model(images), labels)


def train(
    args: argparse.Namespace,
    digits: Digits,
    disk: Disk | None = None,
    *,
    overlapped: bool = True,
    traces: Path | None = None,
) -> Run:
    """Train a model from the seed on: both kinds of loop see the same first parameters, batches and buckets.

    The steps of the overlapped loop are recorded in the folder `traces`, if one is given.
    """
    torch.manual_seed(args.seed)
    model = make_model()
    buckets = make_buckets(model, args.bucket_kib)
    overlap = Overlap(buckets, disk, args.ahead) if overlapped else None
    if disk is not None and not overlapped:
        wait_all([write_first(disk.store, bucket) for bucket in buckets])
    step: Callable[[Callable[[], Tensor]], None] = overlap.step if overlap else partial(blocking_step, buckets, disk)
    batches = list(digits.batches(args.epochs, args.batch_size, args.seed))
    name = f"{'overlapped' if overlapped else 'blocking'}{'' if disk else ' in memory'}"
    dist.barrier()
    start = time.perf_counter()
    with nullcontext() if traces is None else trace.record(traces):
        for number, (images, labels) in enumerate(track(batches, f"{name:20}", disable=dist.get_rank() != 0)):
            with trace.step(number):
                step(partial(loss_of, model, images, labels))
        if overlap:
            overlap.finish()
    return Run(name, model, buckets, len(batches), time.perf_counter() - start)


def differing(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Name the parameters that are not equal to the last bit."""
    other = dict(theirs.named_parameters())
    return [name for name, parameter in ours.named_parameters() if not torch.equal(parameter, other[name])]


def gain(seconds: Mapping[str, float]) -> str:
    """Return lines about what overlap gained over blocking calls with the state in the same place."""
    place = "" if "overlapped" in seconds else " in memory"
    ratio = seconds[f"overlapped{place}"] / seconds[f"blocking{place}"]
    if ratio >= 1:
        return f"no gain from overlap on this machine: it takes {ratio:.2f} times the time of blocking calls"
    told = f"overlap takes {ratio:.2f} of the time of blocking calls"
    if not place:
        of_disk = [seconds[loop] - seconds["blocking in memory"] for loop in ("blocking", "overlapped")]
        told += f"\nthe disk adds {of_disk[0]:.2f} s with blocking calls, and {of_disk[1]:.2f} s with overlap"
    return told


def overlap_of(kind: str, analysis: trace.TraceAnalysis) -> dict[str, float]:
    """Return the medians over the steps that have operations of a kind in flight, in seconds."""
    flights = [step.flights[kind] for step in analysis.steps if kind in step.flights]
    if not flights:
        return {"in_flight": 0.0, "overlapped": 0.0}
    return {
        "in_flight": statistics.median(one.time for one in flights),
        "overlapped": statistics.median(one.overlapped for one in flights),
    }


def show(results: Mapping[str, Any]) -> None:
    """Print the time, the overlaps, and the outcome of every check."""
    console = Console()
    console.print(results["analysis"], highlight=False, markup=False, soft_wrap=True)
    console.print(f"{results['steps']} steps:")
    for loop, seconds in results["seconds"].items():
        console.print(f"  {LOOPS[loop] + ':':58} {seconds:5.2f} s")
    if len(results["seconds"]) > 1:
        console.print(gain(results["seconds"]))
    if results["disk"] is not None:
        console.print(DISK.format_map(results["disk"]))
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
    parser.add_argument("--state", choices=["remote", "memory"], default="remote", help="where Adam's state is kept")
    parser.add_argument("--ahead", type=int, default=3, help="buckets whose state may be in memory at a time")
    parser.add_argument("--folder", type=Path, help="on the disk that is served; default: where temporary files go")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="keep the traces of all ranks there; empty before")
    parser.add_argument("--no-compare", action="store_true", help="do not train again with blocking calls")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/train_digits.py")
    return args


def results_of(args: argparse.Namespace, digits: Digits) -> dict[str, Any]:
    """Train, check, and collect what the program reports."""
    with ExitStack() as stack:
        disk = stack.enter_context(next_workers_disk(args.folder)) if args.state == "remote" else None
        own = args.trace or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-digits-")))
        traces = Path(config.trace_dir) if config.trace_dir else own  # CUDAFUTURE_TRACE records the process already
        run = train(args, digits, disk, traces=None if config.trace_dir else traces)
        same = same_on_every_rank(run.model)  # and all ranks are here
        served = None if disk is None else disk.statistics()
        states = None if disk is None else read_states(disk.store, run.buckets)
        analysis = trace.analyse(traces)  # of all ranks, which have written theirs; without --trace, of this one
        others = [] if args.no_compare or disk is None else [train(args, digits, disk, overlapped=False)]
    if not args.no_compare:
        others.append(train(args, digits, overlapped=False))
    accuracy = digits.accuracy(run.model)
    results: dict[str, Any] = {
        "steps": run.steps,
        "seconds": {each.name: each.seconds for each in [run, *others]},
        "accuracy": accuracy,
        "checks": {"accuracy": accuracy >= WANTED_ACCURACY, "same on every rank": same},
        "kib": [bucket.gradients.nbytes / 1024 for bucket in run.buckets],
        "analysis": str(analysis),
        "overlap": {kind: overlap_of(kind, analysis) for kind in ("communication", "io")},
        "disk": served,
    }
    for other in others:
        results["checks"][f"same as {LOOPS[other.name]}"] = not differing(run.model, other.model)
    if states is not None and others:
        results["checks"]["same state on the disk"] = not differing_states(states, others[-1].buckets)
    return results


def main() -> int:
    """Train, check and report; return the number of failed checks."""
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = results_of(args, Digits.load(args.seed))
    if dist.get_rank() == 0:
        show(results)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")
    dist.barrier()  # a rank that fails first must not end the others before their report
    dist.destroy_process_group()
    return list(results["checks"].values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
