"""Train a small GPT whose AdamW state lies on a disk, and once more with the state in memory.

    python examples/train_gpt_nvme.py [--short] [--folder FOLDER] [--when backward]

The text is the source code of Python's standard library on this machine, byte by byte. Each training runs in a process
of its own, so that each has a peak of memory of its own. The program ends with an error unless the loss falls, and
unless losses, parameters and state are equal to the last bit.

The model: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, made small.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cudafuture.swap import OffloadedOptimizer, offload

MIB = 1 << 20
BYTES = 256  # the vocabulary
HEAD = 64  # the width of a head
TEXT = 4 * MIB  # of source code


class Block(nn.Module):
    """Attention to what comes before, and a network for each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the same shape: batch, positions, width."""
        batch, positions, width = x.shape
        three = self.queries_keys_values(self.before_attention(x)).view(batch, positions, 3, width // HEAD, HEAD)
        queries, keys, values = three.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, positions, width))
        result: Tensor = x + self.network(self.before_network(x))
        return result


class GPT(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int, positions: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return a score of every byte for each position: batch, positions, 256."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        scores: Tensor = self.head(self.last(self.blocks(x)))
        return scores


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield positions of the text and the bytes that follow them, the same ones in every run."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)[:TEXT]
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    numbers = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        begins = torch.randint(len(text) - args.positions, (args.batch_size,), generator=numbers)
        chosen = torch.stack([text[begin : begin + args.positions + 1] for begin in begins.tolist()])
        yield chosen[:, :-1], chosen[:, 1:]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all bits of the parameters and of their state."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in ("step", "exp_avg", "exp_avg_sq"))):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def train(args: argparse.Namespace, folder: str | None) -> dict[str, Any]:
    """Train, with the state in a folder or in memory; return what came out."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.positions)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)
    losses: list[float] = []
    with ExitStack() as stack:
        if folder is not None:
            optimizer = stack.enter_context(
                offload(
                    optimizer, folder, when=args.when, min_bytes=1 << 16, chunk_bytes=1 << 20, buffer_bytes=20 * MIB
                )
            )
        start = time.monotonic()
        for text, following in batches(args):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % max(1, args.steps // 8) == 0:
                sys.stderr.write(f"  step {len(losses):3}: loss {losses[-1]:.3f}\n")
        seconds = time.monotonic() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        on_disk = optimizer.statistics().stored_bytes if isinstance(optimizer, OffloadedOptimizer) else 0
        return {
            "losses": losses,
            "digest": digest(model, optimizer),
            "seconds": seconds,
            "peak_bytes": peak,
            "disk_bytes": on_disk,
            "parameters": sum(p.numel() for p in model.parameters()),
        }


def run(where: str) -> dict[str, Any]:
    """Train in a process of its own."""
    sys.stderr.write(f"AdamW's state {where}\n")
    options = [*sys.argv[1:], "--state", where.split()[-1]]
    # glibc's malloc then gives freed tensors back to the system at once, so that the peak is that of tensors in use
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, __file__, *options]
    finished = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def report(disk: dict[str, Any], memory: dict[str, Any]) -> dict[str, bool]:
    """Print both runs, and return what was checked."""
    print(f"{disk['parameters']:,} parameters, {len(disk['losses'])} steps; loss {disk['losses'][0]:.3f} at first")
    for name, result in (("on disk", disk), ("in memory", memory)):
        print(
            f"state {name:>9}: loss {result['losses'][-1]:.3f}, {result['seconds']:.1f} s, peak of memory "
            f"{result['peak_bytes'] / MIB:,.0f} MiB, on disk {result['disk_bytes'] / MIB:,.0f} MiB"
        )
    checks = {
        "the loss falls": disk["losses"][-1] < disk["losses"][0] - 0.5,
        "losses, parameters and state are equal bit for bit": (disk["losses"], disk["digest"])
        == (memory["losses"], memory["digest"]),
    }
    for check, passed in checks.items():
        print(f"{'passed' if passed else 'FAILED'}  {check}")
    return checks


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A small GPT whose AdamW state lies on a disk.")
    parser.add_argument("--short", action="store_true", help="a smaller model and fewer steps: some seconds")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help=f"a multiple of {HEAD}")
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--when", choices=["step", "backward"], default="step")
    parser.add_argument("--folder", type=Path, help="on the disk for the state (a temporary one)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--state", choices=["disk", "memory"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    defaults = (24, 2, 192) if args.short else (30, 6, 512)
    for name, value in zip(("steps", "layers", "width"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.width % HEAD:
        parser.error(f"--width {args.width} is not a multiple of {HEAD}")
    return args


def main() -> int:
    """Train twice, compare, report; the number of checks that failed."""
    args = arguments()
    if args.state is not None:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print(json.dumps(train(args, folder if args.state == "disk" else None)))
        return 0
    disk, memory = run("on disk"), run("in memory")
    checks = report(disk, memory)
    if args.json:
        args.json.write_text(json.dumps({"disk": disk, "memory": memory, "checks": checks}, indent=2) + "\n")
    return list(checks.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
