"""Train on handwritten digits with the model in two and in four stages: a pipeline beside the plain model.

    python examples/pipeline_digits.py [--short] [--device DEVICE] [--schedule NAME]
    torchrun --nproc-per-node 2 examples/pipeline_digits.py [--short] [--schedule NAME]

The stages lie on simulated devices, or on as many GPUs (`--device cuda`). The program prints the table of a step, and
its time and its bubble: predicted from the times of the stages alone, and measured. The plain model is trained on the
same micro-batches. The program exits with an error unless both end with the same parameters, bit for bit, the
accuracy is above 0.9, and the prediction is within a tenth of what was measured.

Under torchrun, with 2 or 4 processes, each process has one stage, on the host, and compares its own parameters.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from _digits import Digits, make_model
from cudafuture.pipeline import Costs, Pipeline
from cudafuture.testing import sim

BALANCES = {2: [5, 6], 4: [2, 3, 3, 3]}
MICROBATCHES = 8
ROWS = 128  # of a mini-batch
WANTED_ACCURACY = 0.9
Clock = Callable[[], float]


def clock_of(device: str) -> Clock:
    """Return a clock in seconds that waits for all devices first: virtual time of simulated ones."""

    def read() -> float:
        for i in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(i)
        return sim.clock() if device == "sim" else time.perf_counter()

    return read


def costs_of(pipeline: Pipeline, batch: Tensor, labels: Tensor, clock: Clock) -> Costs:
    """Measure the stages alone with one micro-batch, the last one with the loss, and a copy between two of them."""
    forward, backward, copies = [], [], [0.0]
    x = batch
    for stage, device in zip(pipeline.stages, pipeline.stage_devices, strict=True):
        began = clock()
        moved = x.to(device, non_blocking=True)
        copies.append(clock() - began if moved is not x else 0.0)
        x = moved.detach().requires_grad_(stage is not pipeline.stages[0])
        is_last = stage is pipeline.stages[-1]
        there = labels.to(device)
        for _ in range(2):  # the first one warms up, and makes the gradients to which the second one adds
            began = clock()
            y = stage(x)
            value = nn.functional.cross_entropy(y, there) * 0.125 if is_last else y
            middle = clock()
            torch.autograd.backward([value], [None if is_last else torch.ones_like(y)])
            ended = clock()
        forward.append(middle - began)
        backward.append(ended - middle)
        x = y
    pipeline.zero_grad()
    return Costs(forward=forward, backward=backward, copy=max(copies))


def train(step: Callable[[Tensor, Tensor], object], module: nn.Module, digits: Digits, epochs: int) -> None:
    """Train with the step, on the same mini-batches in the same order each time."""
    images, labels = digits.train
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(images), generator=generator), ROWS):
            optimizer.zero_grad()
            step(images[rows.to(images.device)], labels[rows.to(labels.device)])
            optimizer.step()


def plain_step(model: nn.Module) -> Callable[[Tensor, Tensor], object]:
    """Return a step of the plain model that accumulates the gradients of the same micro-batches."""

    def step(images: Tensor, labels: Tensor) -> None:
        for x, y in zip(images.tensor_split(MICROBATCHES), labels.tensor_split(MICROBATCHES), strict=True):
            loss = nn.functional.cross_entropy(model(x), y) * (len(x) / len(images))
            torch.autograd.backward(loss)

    return step


def compare(stages: int, device: str, schedule: str, digits: Digits, epochs: int) -> bool:
    """Train both ways, print what the pipeline predicts and takes; return whether all is as it should be."""
    torch.manual_seed(0)
    plain = make_model().to(f"{device}:0")
    torch.manual_seed(0)
    pipeline = Pipeline(
        make_model(),
        [f"{device}:{i}" for i in range(stages)],
        balance=BALANCES[stages],
        microbatches=MICROBATCHES,
        schedule=schedule,
        loss=nn.functional.cross_entropy,
    )
    clock = clock_of(device)
    images, labels = (each[:ROWS] for each in digits.train)
    few = ROWS // MICROBATCHES
    predicted = pipeline.schedule.check(costs_of(pipeline, images[:few], labels[:few], clock))
    pipeline.step(images, labels)
    began = clock()
    pipeline.step(images, labels)
    took = clock() - began
    bubble = 1 - sum(predicted.busy) / (stages * took)
    print(f"{stages} stages on {device}, {schedule}, {MICROBATCHES} micro-batches:")
    print(pipeline.schedule)
    print(f"  step: predicted {predicted.seconds * 1e3:.3f} ms, measured {took * 1e3:.3f} ms")
    print(f"  bubble: predicted {predicted.bubble:.3f}, measured {bubble:.3f}")
    print(f"  micro-batches kept for backward: {pipeline.peak_activations}, predicted {predicted.peak_activations}")
    pipeline.zero_grad()
    train(pipeline.step, pipeline, digits, epochs)
    train(plain_step(plain), plain, digits, epochs)
    trained = pipeline.state_dict()
    is_same = all(torch.equal(trained[name].cpu(), value.cpu()) for name, value in plain.state_dict().items())
    plain.load_state_dict(trained)
    accuracy = digits.accuracy(plain)
    print(f"  accuracy {accuracy:.3f}, the same parameters as the plain model: {is_same}")
    pipeline.close()
    return is_same and accuracy > WANTED_ACCURACY and abs(took / predicted.seconds - 1) < 0.1


def compare_rank(schedule: str, digits: Digits, epochs: int) -> bool:
    """Train a pipeline over the processes; return whether the stages of this one are those of the plain model."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = make_model()
    torch.manual_seed(0)
    pipeline = Pipeline(
        make_model(),
        "cpu",
        balance=BALANCES[size],
        microbatches=MICROBATCHES,
        schedule=schedule,
        loss=nn.functional.cross_entropy,
        group=dist.group.WORLD,
    )
    train(pipeline.step, pipeline, digits, epochs)
    train(plain_step(plain), plain, digits, epochs)
    expected = plain.state_dict()
    is_same = all(torch.equal(value, expected[name]) for name, value in pipeline.state_dict().items())
    pipeline.eval()
    images, labels = digits.test
    with torch.no_grad():
        scores = pipeline(images)  # None but on the rank of the last stage
    accuracy = 1.0 if scores is None else (scores.argmax(1) == labels).float().mean().item()
    print(f"rank {rank} of {size}, {schedule}: the same parameters as the plain model: {is_same}, {accuracy=:.3f}")
    pipeline.close()
    dist.destroy_process_group()
    return is_same and accuracy > WANTED_ACCURACY


def main() -> int:
    """Run the comparisons; return the exit status."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with a pipeline.")
    parser.add_argument("--short", action="store_true", help="fewer epochs")
    parser.add_argument("--device", default="sim", help="type of the devices: sim (default), or cuda")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b (default) or zb1p")
    args = parser.parse_args()
    epochs = 5 if args.short else 10
    if "WORLD_SIZE" in os.environ:
        return 0 if compare_rank(args.schedule, Digits.load(0), epochs) else 1
    if args.device == "sim":
        sim.enable(devices=4, detect=False, memory=1 << 30)
    digits = Digits.load(0).to(torch.device(args.device, 0))
    counts = [count for count in BALANCES if count <= torch.accelerator.device_count()]
    results = [compare(count, args.device, args.schedule, digits, epochs) for count in counts]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
