"""Train a deep model whose activations do not stay in memory: forward writes them to disk, backward reads them ahead.

    python examples/offload_activations.py --folder /mnt/nvme

Autograd saves the activations of forward for backward. Two hooks (``torch.autograd.graph.saved_tensors_hooks``) put
each large one into a ``DiskStore`` instead, and get it back when backward asks for it. Backward wants them in the
opposite order: so each time that it asks, the ones before are read as well. Both go on while the model computes.

The program makes the same step as plain torch does it, compares all gradients, and prints both peaks and times. It
exits with an error when a gradient differs, or when nothing was saved. With ``--device cuda`` the same code offloads
the memory of a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cudafuture import CUDAFuture
from cudafuture.store import DiskStore

WIDTH = 128
MIB = 1 << 20
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Saved:
    """Handle that autograd keeps in place of an activation."""

    number: int
    key: str


class OffloadActivations:
    """A context for forward: what autograd saves there is kept in a store.

    At most `in_flight` bytes are on their way to the disk, whose memory cannot be given back yet; forward waits for the
    disk beyond that. Backward has `ahead` activations more than it asks for.
    """

    def __init__(self, store: DiskStore, at_least: int = MIB, in_flight: int = 128 * MIB, ahead: int = 2) -> None:
        self.store, self.at_least, self.in_flight, self.ahead = store, at_least, in_flight, ahead
        self.saved: list[Saved] = []
        self.known: dict[tuple[int, int], tuple[Saved, CUDAFuture[int]]] = {}  # by memory, while that is being written
        self.writes: deque[tuple[tuple[int, int], CUDAFuture[int], Tensor]] = deque()
        self.reads: dict[int, CUDAFuture[Tensor]] = {}
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)

    def __enter__(self) -> None:
        self.hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: Tensor) -> Saved | Tensor:
        """Write what autograd saves; return what it keeps instead."""
        if tensor.nbytes < self.at_least or tensor.is_leaf or tensor._base is not None:
            return tensor  # inputs and parameters stay in memory in any case, and so does what a view is of
        memory = (tensor.data_ptr(), tensor._version)
        if memory in self.known:  # the output of one operation, and the input of the next
            return self.known[memory][0]
        self.wait_for_room(tensor.nbytes)
        saved = Saved(len(self.saved), f"activation {len(self.saved)}")
        write = self.store.write(saved.key, tensor.detach())
        self.saved.append(saved)
        self.known[memory] = saved, write
        self.writes.append((memory, write, tensor.detach()))
        return saved

    def wait_for_room(self, nbytes: int) -> None:
        """Wait until so much more may be on its way to the disk."""
        while self.writes and (
            sum(t.nbytes for _, _, t in self.writes) + nbytes > self.in_flight or self.writes[0][1].done()
        ):
            self.finish_write()

    def finish_write(self) -> None:
        """Wait until the first write in flight is on the disk."""
        memory, write, tensor = self.writes.popleft()
        write.wait()  # raises what the disk has to say
        del self.known[memory]  # from now on other tensors may lie there
        if tensor._version != memory[1]:
            raise RuntimeError("an activation was changed in place while it was written: what was saved is in doubt")

    def unpack(self, saved: Saved | Tensor) -> Tensor:
        """Return what was saved, and read what backward will ask for next."""
        if isinstance(saved, Tensor):
            return saved
        self.finish_writes()
        for number in range(saved.number, max(-1, saved.number - 1 - self.ahead), -1):
            if number not in self.reads:
                self.reads[number] = self.store.read(self.saved[number].key, device=self.device)
        return self.reads.pop(saved.number).wait(non_blocking=True)

    def finish_writes(self) -> None:
        """Wait until all is on the disk."""
        while self.writes:
            self.finish_write()

    def end_step(self) -> None:
        """Forget the activations of a step."""
        self.reads.clear()
        self.store.deletev(saved.key for saved in self.saved).wait()
        self.saved.clear()

    device = torch.device("cpu")


class Peak:
    """The most memory that was in use since this was made, beyond what was in use then, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cpu":
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # begin anew
        else:
            torch.accelerator.reset_peak_memory_stats(device)
        self.before = self.now()

    def now(self) -> int:
        """Return the most since this was made, with what was in use before."""
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def bytes(self) -> int:
        """Return the most since this was made, without that."""
        return self.now() - self.before


def make_model(depth: int, device: torch.device) -> nn.Sequential:
    """Return the same deep model each time."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))
    return nn.Sequential(*layers).to(device)


def step(model: nn.Module, batch: Tensor, offload: OffloadActivations | None) -> tuple[list[Tensor], float, int]:
    """Return the gradients of a step, its seconds, and its peak in bytes."""
    model.zero_grad()
    peak, begin = Peak(batch.device), time.perf_counter()
    if offload is None:
        loss = model(batch).square().mean()
    else:
        offload.device = batch.device
        with offload:
            loss = model(batch).square().mean()
    loss.backward()
    if batch.device.type != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - begin
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, seconds, peak.bytes()


def main() -> None:
    """Make the same step with activations in memory and on disk."""
    parser = argparse.ArgumentParser(description="Activations on disk, beside the same step in memory.")
    parser.add_argument("--folder", default="activations", help="where the store is to be")
    parser.add_argument("--depth", type=int, default=16, help="layers")
    parser.add_argument("--rows", type=int, default=73728, help="of a batch; 128 numbers each")
    parser.add_argument("--in-flight", type=int, default=128, help="MiB that may be on their way to the disk")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)  # memory goes back to the system at once, so that peaks show
    device = torch.device(arguments.device)
    model, batch = make_model(arguments.depth, device), torch.randn(arguments.rows, WIDTH, device=device)
    step(model, batch, None)  # warm
    wanted, plain_seconds, plain_peak = step(model, batch, None)
    with DiskStore(arguments.folder) as store:
        offload = OffloadActivations(store, in_flight=arguments.in_flight * MIB)
        step(model, batch, offload)
        offload.end_step()
        gradients, seconds, peak = step(model, batch, offload)
        written = store.statistics().bytes
        offload.end_step()
    print(f"{arguments.depth} layers, {batch.nbytes / MIB:.0f} MiB a batch, {written / MIB:.0f} MiB on disk")
    print(f"in memory  {plain_peak / MIB:8.0f} MiB {plain_seconds:8.2f} s")
    print(f"offloaded  {peak / MIB:8.0f} MiB {seconds:8.2f} s")
    if not all(torch.equal(a, b) for a, b in zip(wanted, gradients, strict=True)):
        sys.exit("the gradients differ")
    if peak >= plain_peak:
        sys.exit("nothing was saved")


if __name__ == "__main__":
    main()
