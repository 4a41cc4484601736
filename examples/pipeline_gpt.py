"""Train a small GPT on a mesh of processes: two pipelines beside each other, with AdamW's state on disk.

    torchrun --nproc-per-node 4 examples/pipeline_gpt.py [--short] [--replicas 2] [--schedule NAME] [--folder FOLDER]

Each pipeline is a replica of the model for its own samples, and has as many ranks as remain. The model is made on the
meta device, so that each rank has memory for its own stages alone, and keeps the state of their optimizer in files of
its own. The program exits with an error unless each rank ends with the parameters of the plain model, bit for bit,
which it trains on all samples beside the pipeline.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from cudafuture.pipeline import Pipeline
from cudafuture.swap import offload
from train_gpt_nvme import BYTES, Block, batches

LAYERS, WIDTH = 4, 64
ROWS, MICROBATCHES = 8, 4  # of each replica


class Embedding(nn.Module):
    """Vectors of the bytes and of their positions."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(positions, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        """Return activations for bytes: batch, positions, width."""
        x: Tensor = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return x


def make_model(positions: int) -> nn.Sequential:
    """Return a transformer that predicts the next byte."""
    blocks = [Block(WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(Embedding(positions), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False))


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    """Return the mean loss over all positions."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model, or of a part of it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)


def set_plain_gradients(model: nn.Module, text: Tensor, following: Tensor, replicas: int) -> None:
    """Compute the average of the gradients that each replica has of its samples, micro-batch by micro-batch."""
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for own in zip(text.tensor_split(replicas), following.tensor_split(replicas), strict=True):
        model.zero_grad()
        for x, y in zip(*(part.tensor_split(MICROBATCHES) for part in own), strict=True):
            torch.autograd.backward(loss_of(model(x), y) * (len(x) / ROWS))
        for total, parameter in zip(sums, parameters, strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    for total, parameter in zip(sums, parameters, strict=True):
        parameter.grad = total / replicas


def train(args: argparse.Namespace, folder: Path) -> bool:
    """Train both ways; return whether the stages of this rank are those of the plain model."""
    mesh = init_device_mesh("cpu", (args.replicas, dist.get_world_size() // args.replicas), mesh_dim_names=("dp", "pp"))
    replica, ranks = mesh.get_local_rank("dp"), mesh.size(1)
    torch.manual_seed(args.seed)
    plain = make_model(args.positions)
    state = {name: value.clone() for name, value in plain.state_dict().items()}  # as a checkpoint has it
    with torch.device("meta"):
        model = make_model(args.positions)
    balance = [len(part) for part in torch.arange(len(model)).tensor_split(ranks)]
    pipeline = Pipeline(
        model,
        "cpu",
        balance=balance,
        microbatches=MICROBATCHES,
        schedule=args.schedule,
        loss=loss_of,
        group=mesh.get_group("pp"),
        replicas=mesh.get_group("dp"),
        initialize=lambda stage: stage.load_state_dict({name: state[name] for name in stage.state_dict()}),
    )
    of_plain = adamw(plain)
    with offload(adamw(pipeline), folder / f"rank-{dist.get_rank()}", min_bytes=1 << 12) as optimizer:
        for text, following in batches(args):
            optimizer.zero_grad()
            x, y = (each.tensor_split(args.replicas)[replica] for each in (text, following))
            loss = pipeline.step(x, y)  # None but on the ranks of the last stage
            optimizer.step()
            set_plain_gradients(plain, text, following, args.replicas)
            of_plain.step()
        stored = optimizer.statistics().stored_bytes
    expected = plain.state_dict()
    is_same = all(torch.equal(value, expected[name]) for name, value in pipeline.state_dict().items())
    print(
        f"rank {mesh.get_local_rank('pp')} of {ranks}, replica {replica}: the parameters of the plain model: {is_same}"
        f", {stored >> 10} KiB of state on disk{'' if loss is None else f', loss {loss.item():.3f}'}"
    )
    pipeline.close()
    return is_same and stored > 0


def main() -> int:
    """Train; return the exit status."""
    parser = argparse.ArgumentParser(description="Train a small GPT with pipelines beside each other.")
    parser.add_argument("--short", action="store_true", help="fewer steps")
    parser.add_argument("--replicas", type=int, default=2, choices=[1, 2], help="pipelines (default: 2)")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b (default) or zb1p")
    parser.add_argument("--folder", type=Path, help="for the state, on a disk (default: the system's for such files)")
    args = parser.parse_args()
    args.seed, args.positions, args.steps = 0, 64, 4 if args.short else 40
    args.batch_size = ROWS * args.replicas
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        is_same = train(args, Path(folder))
    dist.destroy_process_group()
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
