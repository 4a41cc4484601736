"""One stage of a pipeline: what its cells compute for a micro-batch, and what it keeps between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree

from cudafuture.pipeline._split_backward import WeightPart, input_gradient
from cudafuture.pipeline.checkpoint import RandomState, checkpointing, recomputing
from cudafuture.pipeline.skip import SkipTracker, use_skip_tracker

__all__ = ["Message", "Skip", "Stage"]

Skip = tuple[Any, str]
"""A namespace and a name: see ``skippable``."""


class Message(NamedTuple):
    """A value of any nesting on its way between two stages."""

    leaves: list[Any]
    structure: _pytree.TreeSpec
    needs_gradient: list[bool]
    """For each leaf, whether the sender wants its gradient."""

    @classmethod
    def of(cls, value: Any, needs_gradient: Callable[[torch.Tensor], bool]) -> Message:
        """Return a value taken apart; its tensors are detached."""
        leaves, structure = _pytree.tree_flatten(value)
        needs = [isinstance(leaf, torch.Tensor) and needs_gradient(leaf) for leaf in leaves]
        return cls([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure, needs)

    def value(self) -> Any:
        """Return the value put together."""
        return _pytree.tree_unflatten(self.leaves, self.structure)


class Sent(NamedTuple):
    """What a forward cell gives."""

    message: Message
    stashed: dict[Skip, torch.Tensor | None]


class _Start(torch.autograd.Function):
    """The start of a stage's graph. In backward it keeps the gradient of a received tensor."""

    @staticmethod
    def forward(
        ctx: Any, start: torch.Tensor, gradients: dict[Any, torch.Tensor | None], key: Any, received: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients, ctx.key = gradients, key
        return received.detach()  # no view of it and no leaf, so the stage may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.key] = gradients[0]
        return (None,) * 4


@dataclass
class _Saved:
    """What a stage keeps of a micro-batch from its forward cell to its last one."""

    received: Message
    popped: dict[Skip, torch.Tensor | None]
    target: Any
    weight: float
    start: torch.Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    roots: dict[Any, GradientEdge] = field(default_factory=dict)
    """Where backward begins, by the index of the leaf sent, by the skip, or "loss"."""
    gradients: dict[Any, torch.Tensor | None] = field(default_factory=dict)
    """Of what was received, by the index of the leaf or by the skip."""
    random: RandomState | None = None
    """Where the generators were; None: the graph was kept, and nothing has to be computed again."""
    weight_part: WeightPart | None = None

    def forget_inputs(self) -> None:
        """Drop what only a second forward pass would need; the graph has what it needs of that."""
        self.received = self.received._replace(leaves=[])
        self.popped, self.target = {}, None


class Stage:
    """A part of a model on one device.

    Args:
        index: of the stage, from 0.
        module: called with one value, as the parts of an nn.Sequential are.
        device: where it lies.
        loss: of the last stage, ``loss(output)`` or ``loss(output, target)``; None: not the last stage.
    """

    def __init__(
        self, index: int, module: torch.nn.Module, device: torch.device, loss: Callable[..., torch.Tensor] | None
    ) -> None:
        self.index, self.module, self.device, self.loss = index, module, device, loss
        self._saved: dict[int, _Saved] = {}
        self.losses: dict[int, torch.Tensor] = {}

    # ---- cells

    def forward(
        self,
        microbatch: int,
        received: Message,
        popped: dict[Skip, torch.Tensor | None],
        target: Any,
        weight: float,
        is_checkpointed: bool,
    ) -> Sent:
        """Run the module for a micro-batch, and keep what its backward needs: the graph, or its inputs.

        Args:
            microbatch: its index.
            received: the input, on this device.
            popped: the skips that come from other stages.
            target: of the loss, in the last stage; None: the loss takes none.
            weight: factor of the loss.
            is_checkpointed: whether the graph is dropped, and made again in backward.
        """
        saved = self._saved[microbatch] = _Saved(received, popped, target, weight)
        if not is_checkpointed:
            sent, loss = self._run(saved, self.loss)
            saved.forget_inputs()
        else:
            versions = _versions(saved)
            with checkpointing(), torch.no_grad():
                saved.random = RandomState.capture(self.device)
                sent, loss = self._run(saved, self.loss)
            if _versions(saved) != versions:
                raise RuntimeError(
                    f"stage {self.index} changes its input in place, so it cannot be computed again; "
                    'pass checkpoint="never", or begin the stage with another module'
                )
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        return sent

    def infer(self, received: Message, popped: dict[Skip, torch.Tensor | None]) -> Sent:
        """Run the module for a micro-batch without a loss and without a graph; keep nothing."""
        with torch.no_grad():
            return self._run(_Saved(received, popped, None, 1.0), None)[0]

    def backward(self, microbatch: int, gradients: Mapping[Any, torch.Tensor | None]) -> dict[Any, torch.Tensor | None]:
        """Accumulate the gradients of the parameters; return those of what was received.

        `gradients` are those of what was sent, by the index of the leaf or by the skip.
        """
        saved = self._with_graph(microbatch)
        roots, given = _given(saved, gradients)
        if roots:
            torch.autograd.backward(roots, given)
        del self._saved[microbatch]
        return saved.gradients

    def input_gradient(
        self, microbatch: int, gradients: Mapping[Any, torch.Tensor | None]
    ) -> dict[Any, torch.Tensor | None]:
        """Return the gradients of what was received. ``weight_gradient`` has to follow."""
        saved = self._with_graph(microbatch)
        roots, given = _given(saved, gradients)
        saved.weight_part = input_gradient(roots, given, saved.start) if roots else None
        saved.roots = {}
        return saved.gradients

    def weight_gradient(self, microbatch: int) -> None:
        """Accumulate the gradients of the parameters."""
        part = self._saved[microbatch].weight_part
        if part is not None:
            part.run()
        del self._saved[microbatch]

    def reset(self) -> None:
        """Drop what was kept."""
        self._saved.clear()
        self.losses.clear()

    # ---- inside a cell

    def _with_graph(self, microbatch: int) -> _Saved:
        saved = self._saved[microbatch]
        if saved.random is not None:
            with recomputing(saved.random), torch.enable_grad():
                self._run(saved, self.loss)
            saved.forget_inputs()
        return saved

    def _run(self, saved: _Saved, loss_of: Callable[..., torch.Tensor] | None) -> tuple[Sent, torch.Tensor | None]:
        """Run the module on what was received, and the loss on what it gives; note the roots of the graph."""
        received, has_graph = saved.received, torch.is_grad_enabled()
        leaves = [
            _started(saved, i, leaf) if needs and has_graph else _fresh(leaf)
            for i, (leaf, needs) in enumerate(zip(received.leaves, received.needs_gradient, strict=True))
        ]
        skips = _Skips(saved)
        with use_skip_tracker(skips):
            value = self.module(_pytree.tree_unflatten(leaves, received.structure))
        loss = None
        if loss_of is not None:
            loss = loss_of(value) if saved.target is None else loss_of(value, saved.target)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError(f"a loss returns a tensor with one element, not {_described(loss)}")
            loss = loss * saved.weight
        gets_gradient = self._needs_gradient(saved, has_graph)
        message = Message.of(value, gets_gradient)
        if has_graph:
            roots: dict[Any, Any] = {"loss": loss} if loss is not None else dict(enumerate(_pytree.tree_leaves(value)))
            for key, tensor in (roots | skips.stashed).items():
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    saved.roots[key] = get_gradient_edge(tensor)
        stashed = {skip: None if x is None else x.detach() for skip, x in skips.stashed.items()}
        return Sent(message, stashed), loss

    def _needs_gradient(self, saved: _Saved, has_graph: bool) -> Callable[[torch.Tensor], bool]:
        """Return whether a tensor that the stage makes needs a gradient: without a graph, whether it may."""
        if has_graph:
            return lambda tensor: tensor.requires_grad
        may = any(saved.received.needs_gradient) or any(p.requires_grad for p in self.module.parameters())
        return lambda tensor: may and (tensor.is_floating_point() or tensor.is_complex())


class _Skips(SkipTracker):
    """The skips of one run of a stage: those that come from other stages, and those that it stashes."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__()
        self._saved = saved
        self.stashed: dict[Skip, torch.Tensor | None] = {}

    def save(self, batch: Any, ns: Any, name: str, tensor: torch.Tensor | None) -> None:
        """Take a tensor that a module stashes."""
        self.stashed[ns, name] = tensor

    def load(self, batch: Any, ns: Any, name: str) -> torch.Tensor | None:
        """Return a tensor that a module pops."""
        skip = (ns, name)
        if skip in self.stashed:  # inside this stage
            return self.stashed.pop(skip)
        tensor = self._saved.popped[skip]
        if tensor is None or not torch.is_grad_enabled() or not tensor.is_floating_point():
            return tensor
        return _started(self._saved, skip, tensor)


def _given(
    saved: _Saved, gradients: Mapping[Any, torch.Tensor | None]
) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
    """Return the roots that have a gradient, and those; the loss is its own."""
    if "loss" in saved.roots:
        gradients = {**gradients, "loss": None}
    keys = [key for key in saved.roots if key == "loss" or gradients.get(key) is not None]
    return [saved.roots[key] for key in keys], [gradients[key] for key in keys]


def _started(saved: _Saved, key: Any, received: torch.Tensor) -> torch.Tensor:
    started: torch.Tensor = _Start.apply(saved.start, saved.gradients, key, received)  # type: ignore[no-untyped-call]
    return started


def _fresh(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _versions(saved: _Saved) -> list[int]:
    tensors = [*saved.received.leaves, *saved.popped.values()]
    return [tensor._version for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _described(value: object) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
