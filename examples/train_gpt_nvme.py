"""Train a small GPT three times: with AdamW's state in memory, on a disk without overlap, and on a disk with overlap.

    python examples/train_gpt_nvme.py [--short] [--folder FOLDER] [--when step]

Without overlap, the update of a parameter waits for the read of its state, and the next read waits for the write. With
overlap, reads run ahead of the updates, and updates and writes run beside backward and the next forward. The program
prints the time of a step of each training: the cost of the disk, and the part of it that overlap hides. Overlap needs a
core that does not compute, so on two cores one thread computes.

The text is the source code of Python's standard library on this machine, byte by byte. Each training runs in its own
process, so that each process has its own memory peak. The program exits with an error unless the loss falls, and
unless losses, parameters and state of all trainings are equal bit for bit.

The model: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, made small.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cudafuture.swap import OffloadedOptimizer, offload

MIB = 1 << 20
BYTES = 256  # the vocabulary
HEAD = 64  # the width of an attention head
TEXT = 4 * MIB  # of source code
RUNS = {"memory": "in memory", "serial": "on disk, without overlap", "disk": "on disk, with overlap"}
WIDEST = max(map(len, RUNS.values()))
WARM_UP = 2  # steps
FALL = 2.0  # by which the last quarter's mean loss is below the first loss


class Block(nn.Module):
    """Causal attention, then a feed-forward network for each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the same shape: batch, positions, width."""
        batch, positions, width = x.shape
        projected = self.projections(self.attention_norm(x)).view(batch, positions, 3, width // HEAD, HEAD)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, positions, width))
        result: Tensor = x + self.network(self.network_norm(x))
        return result


class GPT(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int, positions: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores of all bytes for each position: batch, positions, 256."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of the text, each with the bytes that follow its positions; every run gets the same ones."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)[:TEXT]
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.positions, (args.batch_size,), generator=generator)
        parts = torch.stack([text[start : start + args.positions + 1] for start in starts.tolist()])
        yield parts[:, :-1], parts[:, 1:]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of the parameters and their state."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in ("step", "exp_avg", "exp_avg_sq"))):
            sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def mean(values: list[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def milliseconds(seconds: list[float]) -> tuple[float, float]:
    """Return the median and the least time of a step, without the first ones, which allocate the state."""
    steps = [1e3 * each for each in seconds[WARM_UP:] or seconds]
    return median(steps), min(steps)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train with the state in memory or on disk, and return the results of this run."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    before = peak_bytes()
    model = GPT(args.width, args.layers, args.positions)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)
    losses: list[float] = []
    seconds: list[float] = []
    with ExitStack() as stack:
        if args.state != "memory":
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder))
            options = {"min_bytes": 1 << 16, "chunk_bytes": 1 << 20, "buffer_bytes": args.buffer_mib * MIB}
            overlaps = args.state == "disk"
            when: Any = args.when if overlaps else "step"
            prefetch = args.prefetch if overlaps else 0
            optimizer = stack.enter_context(offload(optimizer, folder, when=when, prefetch=prefetch, **options))
        interval = max(1, args.steps // 6)
        for text, following in batches(args):
            start = time.monotonic()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.monotonic() - start)
            if len(losses) % interval == 0:
                sys.stderr.write(f"  step {len(losses):3}: mean loss {mean(losses[-interval:]):.3f}\n")
        peak = peak_bytes()  # before the digest, which reads all state
        return {
            "losses": losses,
            "digest": digest(model, optimizer),
            "seconds": seconds,
            "before_bytes": before,
            "peak_bytes": peak,
            "disk_bytes": optimizer.statistics().stored_bytes if isinstance(optimizer, OffloadedOptimizer) else 0,
            "parameters": sum(p.numel() for p in model.parameters()),
        }


def run(state: str) -> dict[str, Any]:
    """Train in a new process."""
    sys.stderr.write(f"AdamW's state {RUNS[state]}\n")
    # With this threshold glibc's malloc returns freed tensors to the system at once, so the peak is that of tensors in
    # use. Threads of OpenMP that wait for work then leave the processor to others.
    settings = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__, *sys.argv[1:], "--state", state]
    finished = subprocess.run(command, stdout=subprocess.PIPE, env={**settings, **os.environ}, check=True)
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def report(results: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Print all runs, and return the outcome of each check."""
    losses, parameters = results["disk"]["losses"], results["disk"]["parameters"]
    last = mean(losses[-max(1, len(losses) // 4) :])
    print(f"{parameters:,} parameters, {len(losses)} steps: loss {losses[0]:.3f}, at the end {last:.3f}")
    fastest: dict[str, float] = {}
    for state, result in results.items():
        typical, fastest[state] = milliseconds(result["seconds"])
        print(
            f"state {RUNS[state]:>{WIDEST}}: {typical:5,.0f} ms per step, fastest {fastest[state]:5,.0f} ms, "
            f"{result['disk_bytes'] / MIB:2,.0f} MiB on disk, memory peak {result['peak_bytes'] / MIB:,.0f} MiB "
            f"({result['before_bytes'] / MIB:,.0f} before training)"
        )
    # Other programs on the machine slow a step down, and none makes it faster: so the fastest steps are compared.
    serial, overlapped = (fastest[state] - fastest["memory"] for state in ("serial", "disk"))
    print(f"the disk adds {serial:,.0f} ms to the fastest step without overlap, and {overlapped:,.0f} ms with overlap")
    ratio = fastest["disk"] / fastest["serial"]
    print(f"overlap: {ratio:.2f} of the time without it{'' if ratio < 1 else ', so no gain on this machine'}")
    saved = results["memory"]["peak_bytes"] - results["disk"]["peak_bytes"]
    print(f"memory saved: {saved / MIB:,.0f} MiB")
    first, *others = [(result["losses"], result["digest"]) for result in results.values()]
    checks = {
        "the loss falls": last < losses[0] - FALL,
        "losses, parameters and state are equal bit for bit": all(other == first for other in others),
    }
    for check, passed in checks.items():
        print(f"{'passed' if passed else 'FAILED'}  {check}")
    return checks


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A small GPT whose AdamW state lies on a disk.")
    parser.add_argument("--short", action="store_true", help="a smaller model, which takes half a minute")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help=f"a multiple of {HEAD}")
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--batch-size", type=int)
    threads = min(2, max(1, len(os.sched_getaffinity(0)) - 1))  # the store needs a core, too
    parser.add_argument("--threads", type=int, default=threads, help=f"that compute; default here: {threads}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--when", choices=["step", "backward"], default="backward")
    parser.add_argument("--prefetch", type=int, default=4, help="units of state that are read ahead, with overlap")
    parser.add_argument("--folder", type=Path, help="on the disk for the state; default: where temporary files go")
    parser.add_argument("--buffer-mib", type=int, default=12, help="memory for state that is read, updated and written")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--state", choices=list(RUNS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    defaults = (16, 4, 384, 4) if args.short else (30, 6, 512, 8)
    for name, value in zip(("steps", "layers", "width", "batch_size"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.width % HEAD:
        parser.error(f"--width {args.width} is not a multiple of {HEAD}")
    if args.steps < 1:
        parser.error(f"--steps {args.steps} is less than 1")
    return args


def main() -> int:
    """Train three times, compare and report; return the number of checks that failed."""
    args = arguments()
    if args.state is not None:  # one of the three processes
        print(json.dumps(train(args)))
        return 0
    results = {state: run(state) for state in RUNS}
    checks = report(results)
    if args.json:
        args.json.write_text(json.dumps({**results, "checks": checks}, indent=2) + "\n")
    return list(checks.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
