"""Backward pass in two parts: the gradient of the input first, the gradients of the parameters later.

The graph of a stage, from its outputs down::

    roots ──► A ──► B ──► input          A and B lead to the input, so the first part runs them
              │     │                    for each of them it keeps the incoming gradient,
              ▼     ▼                    and the second part starts again from there,
              w     v                    towards the parameters only
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

__all__ = ["input_gradient"]


def input_gradient(roots: list[GradientEdge], gradients: list[torch.Tensor | None], start: torch.Tensor) -> WeightPart:
    """Run the part of backward that leads to `start`, and return the part that leads to parameters.

    `start` is a leaf that the received tensors depend on; None is accumulated in it.
    """
    graph = _AutogradGraph(roots, torch.autograd.graph.get_gradient_edge(start).node)
    part = WeightPart(roots, gradients, graph)
    if graph.leads_to_start:
        # Inputs of this pass, not hooks: these gradients are those before the hooks of tensors, which run again.
        edges = [GradientEdge(node, i) for node in graph.parameters_of for i in range(len(node._input_metadata))]
        inputs = [torch.autograd.graph.get_gradient_edge(start), *edges]
        _, *came_in = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
        for edge, gradient in zip(edges, came_in, strict=True):
            part.keep(edge, gradient)
    return part


class WeightPart:
    """Part of a backward pass that computes the gradients of a stage's parameters."""

    def __init__(self, roots: list[GradientEdge], gradients: list[torch.Tensor | None], graph: _AutogradGraph) -> None:
        self._roots, self._gradients, self._graph = roots, gradients, graph
        self._came_in: dict[Node, list[tuple[GradientEdge, torch.Tensor]]] = {}

    def keep(self, edge: GradientEdge, gradient: torch.Tensor | None) -> None:
        """Keep the incoming gradient of a node."""
        if gradient is not None:
            self._came_in.setdefault(edge.node, []).append((edge, gradient))

    def storages(self) -> frozenset[int]:
        """Return the storages of the gradients that are kept."""
        gradients = [gradient for given in self._came_in.values() for _, gradient in given]
        gradients += [gradient for gradient in self._gradients if gradient is not None]
        return frozenset(
            gradient.untyped_storage()._cdata for gradient in gradients if gradient.layout is torch.strided
        )

    def run(self) -> None:
        """Accumulate the gradients of the parameters."""
        # Parameters that are reached by several paths get the sum in one pass, as in a whole backward.
        if self._graph.others:
            keep = bool(self._came_in)
            torch.autograd.backward(self._roots, self._gradients, retain_graph=keep, inputs=self._graph.others)
        for node, given in self._came_in.items():
            edges, gradients = zip(*given, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self._graph.parameters_of[node])
        self._came_in.clear()
        self._roots.clear()


class _AutogradGraph:
    """Graph behind some roots: the nodes that lead to the start, and the parameters to which these lead directly."""

    def __init__(self, roots: list[GradientEdge], start: Node) -> None:
        children: dict[Node, list[Node]] = {}
        stack = [edge.node for edge in roots]
        while stack:
            node = stack.pop()
            if node not in children:
                children[node] = [child for child, _ in node.next_functions if child is not None]
                stack += children[node]
        self.leads_to_start = _ancestors(start, children)
        by_parameter: dict[Any, set[Node]] = {}  # nodes that lead to the start, and from which a parameter is reached
        for node in self.leads_to_start:
            for leaf in _parameters_below(node, children, self.leads_to_start):
                by_parameter.setdefault(leaf, set()).add(node)
        self.parameters_of: dict[Node, list[torch.Tensor]] = {}
        self.others: list[torch.Tensor] = []  # parameters that are reached by several paths, or not through those nodes
        leaves: list[Any] = [node for node in children if _is_leaf(node) and node is not start]
        for leaf in leaves:
            nodes = by_parameter.get(leaf, set())
            if len(nodes) == 1 and not self._is_reached_otherwise(leaf, roots, children):
                self.parameters_of.setdefault(next(iter(nodes)), []).append(leaf.variable)
            else:
                self.others.append(leaf.variable)

    def _is_reached_otherwise(self, leaf: Node, roots: list[GradientEdge], children: dict[Node, list[Node]]) -> bool:
        """Return whether a path from a root leads to the leaf without a node that leads to the start."""
        stack = [edge.node for edge in roots if edge.node not in self.leads_to_start]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node is leaf:
                return True
            if node not in seen:
                seen.add(node)
                stack += [child for child in children[node] if child not in self.leads_to_start]
        return False


def _is_leaf(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def _ancestors(start: Node, children: dict[Node, list[Node]]) -> set[Node]:
    parents: dict[Node, list[Node]] = {}
    for node, below in children.items():
        for child in below:
            parents.setdefault(child, []).append(node)
    found: set[Node] = set()
    stack = list(parents.get(start, ()))
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += parents.get(node, ())
    return found


def _parameters_below(node: Node, children: dict[Node, list[Node]], without: set[Node]) -> set[Any]:
    """Return the nodes of leaves that are reached from a node without passing nodes that lead to the start."""
    found: set[Any] = set()
    stack = [child for child in children[node] if child not in without]
    seen: set[Node] = set()
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        if _is_leaf(each):
            found.add(each)
        stack += [child for child in children[each] if child not in without]
    return found
