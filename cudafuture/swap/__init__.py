"""Optimizer state in a store: training of models whose optimizer state does not fit into memory."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.swap._offload import offload
from cudafuture.swap._state_mapping import StateMapping
from cudafuture.swap.offloaded_optimizer import OffloadedOptimizer
from cudafuture.swap.statistics import SwapStatistics

__all__ = ["OffloadedOptimizer", "SwapStatistics", "offload"]

break_graphs(StateMapping, *map(globals().get, __all__))
