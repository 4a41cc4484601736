"""DeepSpeed's swapper API: parameters and their optimizer states, swapped in and out one by one."""

from cudafuture.compat.deepspeed.optimizer_swapper import OptimizerSwapper
from cudafuture.compat.deepspeed.timers import Timers
from cudafuture.graph_breaks import break_graphs

__all__ = ["OptimizerSwapper", "Timers"]

break_graphs(*map(globals().get, __all__))
