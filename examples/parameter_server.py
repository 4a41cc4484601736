"""Train a small CNN with a parameter server: trainers push gradients and get new values, each at its own pace.

    torchrun --standalone --nproc-per-node 3 examples/parameter_server.py

Rank 0 keeps the parameters, in shards: groups of layers, each behind an RRef. All other ranks are trainers, which draw
batches of their own. As soon as backward has filled the gradients of a shard:

    shard.rpc_async().push(gradients).then(load the values that come back)

Backward goes on meanwhile, and the pushes of other layers are in flight. Each layer's next forward waits for the one
future that stands for its own values. The server applies a gradient on its arrival, so it was computed
with values that are a few updates old by then, its staleness. To bound that, `push` itself returns a future: a trainer
that is too far ahead of the slowest gets its answer later, and no thread of the server waits meanwhile.

At the end the program checks what it claims, and exits with an error when a check fails: the accuracy on images it has
not seen, that every gradient was applied, and that none was staler than the bound. The ideas: Li and others, "Scaling
Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho and others, "More Effective Distributed ML via a
Stale Synchronous Parallel Parameter Server", NIPS 2013.

With CUDAFUTURE_RPC_SECRET_FILE set, the ranks prove to each other that they know the secret in that file, and sign
every message. Without it, ranks that are all on one machine talk over its loopback interface, which only its own users
reach.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rpc_ext
from _digits import Digits, layer_groups, make_model
from cudafuture import CUDAFuture, gather, wait_all
from cudafuture.config import config

SERVER = "server"
WANTED_ACCURACY = 0.9


# ---- the server


class Shard:
    """Parameters of some layers, in one vector, with an optimizer; it lives on the server."""

    def __init__(self, values: Tensor, trainers: int, args: argparse.Namespace) -> None:
        self.values = nn.Parameter(values)
        self.optimizer = torch.optim.Adam([self.values], args.learning_rate)
        self.slack = args.slack
        self.pushed = [0] * trainers  # gradients of each that were applied
        self.staleness: Counter[int] = Counter()
        self._held: list[tuple[int, CUDAFuture[None]]] = []  # answers to those ahead: how far, and what releases them
        self._lock = threading.Lock()  # guards all of it: several RPC threads serve

    def fetch(self) -> tuple[int, Tensor]:
        """Return the values, and how many gradients are in them."""
        with self._lock:
            return sum(self.pushed), self.values.detach().clone()  # sent while others push

    @rpc_ext.async_execution
    def push(self, trainer: int, version: int, gradient: Tensor) -> CUDAFuture[tuple[int, Tensor]]:
        """Apply a gradient, computed with the values of `version`; the outcome is that of ``fetch``.

        It comes when the slowest trainer is not more than `slack` gradients behind.
        """
        released: CUDAFuture[None] = CUDAFuture()
        with self._lock:
            self.staleness[sum(self.pushed) - version] += 1
            self.values.grad = gradient
            self.optimizer.step()
            self.pushed[trainer] += 1
            self._held.append((self.pushed[trainer], released))
            slowest = min(self.pushed)
            now = [future for pushed, future in self._held if pushed - slowest <= self.slack]
            self._held = [(pushed, future) for pushed, future in self._held if pushed - slowest > self.slack]
        for future in now:
            future.set_result(None)
        return released.then(lambda _: self.fetch())


def flat(layers: Collection[nn.Module]) -> Tensor:
    """Return the parameters of some layers as one vector."""
    return nn.utils.parameters_to_vector(p for layer in layers for p in layer.parameters()).detach()


# ---- a trainer


class Part:
    """The layers of a trainer's model whose parameters are in one shard, and the future of their next values."""

    def __init__(self, layers: Collection[nn.Module], shard: rpc_ext.RRef[Shard], trainer: int) -> None:
        self.parameters = [p for layer in layers for p in layer.parameters()]
        self.shard, self.trainer = shard, trainer
        self.version = 0
        self.waited = 0.0  # seconds
        self.missing = len(self.parameters)  # gradients that backward has still to bring
        self.gradients = torch.zeros(sum(p.numel() for p in self.parameters))
        views = torch.split(self.gradients, [p.numel() for p in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)  # backward fills the vector that is sent
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
        for layer in layers:
            layer.register_forward_pre_hook(self._wait)
        self.loaded: CUDAFuture[None] = shard.rpc_async().fetch().then(self._load)

    def _gradient_is_there(self, _parameter: Tensor) -> None:
        self.missing -= 1
        if self.missing == 0:
            answer = self.shard.rpc_async().push(self.trainer, self.version, self.gradients)
            self.loaded = answer.then(self._load)  # on another thread, beside backward, which is done with these layers
            self.missing = len(self.parameters)

    @torch.no_grad()
    def _load(self, answer: CUDAFuture[tuple[int, Tensor]]) -> None:
        self.version, values = answer.value()  # raises what the call failed with
        nn.utils.vector_to_parameters(values, self.parameters)
        self.gradients.zero_()

    def _wait(self, _layer: nn.Module, _inputs: object) -> None:
        start = time.perf_counter()
        self.loaded.wait(non_blocking=True)
        self.waited += time.perf_counter() - start


@dataclass
class Trained:
    """Report of a trainer."""

    loss: float  # the mean of the last steps
    seconds: float
    waited: float  # seconds of those in which it waited for values
    call_p50: float  # seconds from a call to its answer
    call_p99: float


def train(trainer: int, shards: list[rpc_ext.RRef[Shard]], args: argparse.Namespace) -> Trained:
    """Train on own batches; called by the server, on every trainer."""
    digits, model = Digits.load(args.seed), make_model()
    with rpc_ext.batch(SERVER):  # the first values: one message for all
        groups = layer_groups(model, args.shard_kib)
        parts = [Part(group.values(), shard, trainer) for group, shard in zip(groups, shards, strict=True)]
    gather(*(part.loaded for part in parts)).wait()
    start = time.perf_counter()
    losses = []
    for images, labels in batches(digits, trainer, args):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        losses.append(loss.item())
    wait_all([part.loaded for part in parts])
    seconds = time.perf_counter() - start
    calls = rpc_ext.statistics().destinations[SERVER]
    waited = sum(part.waited for part in parts)
    last = losses[-10:]
    return Trained(sum(last) / len(last), seconds, waited, calls.latency_p50, calls.latency_p99)


def batches(digits: Digits, trainer: int, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images drawn at random, by each trainer with a seed of its own."""
    images, labels = digits.train
    generator = torch.Generator().manual_seed(args.seed + trainer)
    for _ in range(args.steps):
        chosen = torch.randint(len(images), (args.batch_size,), generator=generator)
        yield images[chosen], labels[chosen]


# ---- the whole


@dataclass
class Results:
    """Report of the program."""

    accuracy: float
    staleness: dict[int, int]  # gradients by the number of updates between their values and those they were applied to
    bound: int
    signed: bool
    trainers: dict[str, Trained]
    checks: dict[str, bool]

    def __str__(self) -> str:
        mean = sum(n * count for n, count in self.staleness.items()) / sum(self.staleness.values())
        lines = [
            f"trainers: {len(self.trainers)}; messages: {'signed' if self.signed else 'not signed, no secret is set'}",
            *(
                f"{name}: last loss {t.loss:.4f}, {t.seconds:.1f} s, of which it waited {t.waited:.1f} s; "
                f"a call p50 {t.call_p50 * 1e3:.2f} ms, p99 {t.call_p99 * 1e3:.2f} ms"
                for name, t in self.trainers.items()
            ),
            f"staleness: {mean:.2f} updates in the mean, at most {max(self.staleness)}, allowed {self.bound}",
            f"accuracy on new images: {self.accuracy:.3f}, wanted {WANTED_ACCURACY}",
            *(f"{'passed' if passed else 'FAILED'}  {check}" for check, passed in self.checks.items()),
        ]
        return "\n".join(lines)


def serve(workers: list[str], args: argparse.Namespace) -> Results:
    """Keep the parameters, have the others train, and check what came of it."""
    trainers = [worker for worker in workers if worker != SERVER]
    torch.manual_seed(args.seed)
    model = make_model()
    groups = [group.values() for group in layer_groups(model, args.shard_kib)]
    shards = [Shard(flat(group), len(trainers), args) for group in groups]
    references = [rpc_ext.RRef(shard) for shard in shards]
    calls = [(number, references, args) for number in range(len(trainers))]
    trained = rpc_ext.map_call(trainers, train, calls, timeout=args.timeout).wait()
    for group, shard in zip(groups, shards, strict=True):
        nn.utils.vector_to_parameters(shard.values.detach(), [p for layer in group for p in layer.parameters()])
    accuracy = Digits.load(args.seed).accuracy(model)
    staleness = sum((shard.staleness for shard in shards), Counter[int]())
    # While a trainer computes one gradient, each other one can get from `slack` behind it to `slack` ahead of it, and
    # one further: its next push is applied, too, and only the answer held.
    bound = (len(trainers) - 1) * (2 * args.slack + 1)
    checks = {
        "accuracy": accuracy >= WANTED_ACCURACY,
        "every gradient was applied": all(shard.pushed == [args.steps] * len(trainers) for shard in shards),
        "staleness within its bound": max(staleness) <= bound,
    }
    signed = config.rpc_secret_file is not None
    by_name = dict(zip(trainers, trained, strict=True))
    return Results(accuracy, dict(sorted(staleness.items())), bound, signed, by_name, checks)


def arguments() -> argparse.Namespace:
    """Read the command line, and refuse to run without trainers."""
    parser = argparse.ArgumentParser(description="Asynchronous training with a parameter server.")
    parser.add_argument("--steps", type=int, default=200, help="of each trainer")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--slack", type=int, default=2, help="steps that a trainer may be ahead of the slowest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-kib", type=int, default=64, help="a shard is larger only when one layer is")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all of the training")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        parser.error("start it with: torchrun --standalone --nproc-per-node 3 examples/parameter_server.py")
    return args


def main() -> int:
    """Serve or train, by the rank; return the number of failed checks."""
    args = arguments()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # all ranks are here: no other host needs to reach them
    results: Any = None
    with rpc_ext.init_rpc(SERVER if rank == 0 else f"trainer{rank}") as session:
        if rank == 0:
            results = serve(session.workers, args)
            print(results, flush=True)
    # The trainers were called until here: the end of the context waits until every rank reaches it.
    if results is None:
        return 0
    if args.json:
        args.json.write_text(json.dumps(asdict(results), indent=2) + "\n")
    return list(results.checks.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
