"""The swapper that offloaded optimizers are measured beside: DeepSpeed's PipelinedOptimizerSwapper, with torch's Adam.

docs/benchmarks.md says how to install DeepSpeed. It keeps three float32 tensors of each parameter in files:
the master weight and Adam's two. Its step is the loop of ZeRO stage 3: swap in one parameter while the next is read,
step, copy to the half-precision parameter, swap out.
"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["DeepSpeedSwapper", "missing_deepspeed"]

MIB = 1 << 20


def missing_deepspeed() -> str:
    """Return why DeepSpeed cannot take part; empty if it can."""
    try:
        importlib.import_module("deepspeed")
    except ImportError as e:
        return f"the peer is DeepSpeed ({e}); docs/benchmarks.md says how to install it"
    return ""


class DeepSpeedSwapper:
    """A pipelined swapper, and an Adam that it swaps."""

    def __init__(self, folder: Path, halves: list[torch.Tensor]) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            importlib.import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        zero = importlib.import_module("deepspeed.runtime.zero.offload_config")
        swapping = importlib.import_module("deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper")
        config = zero.DeepSpeedZeroOffloadOptimizerConfig(
            device="nvme", nvme_path=str(folder), buffer_count=12, pipeline_read=True, pipeline_write=True
        )
        aio: dict[str, Any] = {
            "block_size": MIB,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
        self.halves = halves
        self.masters = [torch.nn.Parameter(half.float().flatten()) for half in halves]
        for i, master in enumerate(self.masters):
            master.ds_id = str(i)  # type: ignore[attr-defined]
        self.optimizer = torch.optim.Adam([self.masters[0]], foreach=False)
        largest = max(master.numel() for master in self.masters)
        cpu = torch.device("cpu")
        self.swapper = swapping.PipelinedOptimizerSwapper(
            config, aio, str(folder), self.optimizer, largest, cpu, torch.float32, None
        )
        swapped = [m for m in self.masters if self.swapper.is_swappable_tensor(numel=m.numel())]
        self.swapper.initialize_parameters(swapped, [m.data for m in swapped])

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Update all parameters."""
        swapped = [self.swapper.is_swappable_tensor(numel=g.numel()) for g in gradients]
        order = [i for i in range(len(gradients)) if swapped[i]]
        following = dict(itertools.pairwise(order))
        for i, master in enumerate(self.masters):
            after = self.masters[following[i]] if i in following else None
            if swapped[i]:
                self.swapper.swap_in_optimizer_state(master, async_parameter=after)
            master.grad = gradients[i].flatten().float()
            self.optimizer.param_groups[0]["params"] = [master]
            self.optimizer.step()
            master.grad = None
            self.halves[i].copy_(master.data.view_as(self.halves[i]))
            if swapped[i]:
                self.swapper.swap_out_optimizer_state(master, async_swap=after is not None)
