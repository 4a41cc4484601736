"""Optimizer state in a store: training of models whose optimizer state does not fit into memory."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.swap._offload import offload
from cudafuture.swap._state_mapping import StateMapping
from cudafuture.swap.offloaded_optimizer import OffloadedOptimizer
from cudafuture.swap.statistics import SwapStatistics

__all__ = ["OffloadedOptimizer", "SwapStatistics", "offload"]

# Not public. ``cudafuture.compat.deepspeed`` swaps single parameters with the same parts.
from cudafuture.swap._checkpoints import Checkpoints as Checkpoints
from cudafuture.swap._errors import clear_tracebacks as clear_tracebacks
from cudafuture.swap._gradients import StoredGradient as StoredGradient
from cudafuture.swap._namespace import OptimizerNamespace as OptimizerNamespace
from cudafuture.swap._parameter_state import Chunk as Chunk
from cudafuture.swap._parameter_state import ParameterState as ParameterState
from cudafuture.swap._parameter_state import StoredTensor as StoredTensor
from cudafuture.swap._parameter_state import copied as copied
from cudafuture.swap._step_pipeline import StepPipeline as StepPipeline
from cudafuture.swap._unit import Unit as Unit
from cudafuture.swap._unit import UnitBuffers as UnitBuffers
from cudafuture.swap._unit import layout_of as layout_of
from cudafuture.swap._unit import places as places
from cudafuture.swap._update import Update as Update

break_graphs(StateMapping, *map(globals().get, __all__))
