"""Stage of a pipeline: the computation of its cells for a micro-batch, and the state between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree

from cudafuture._tensors import version_of
from cudafuture.pipeline._dependency import phony
from cudafuture.pipeline._sharing import distinct, refuse_overlap, with_each
from cudafuture.pipeline._split_backward import WeightPart, input_gradient
from cudafuture.pipeline.checkpoint import RandomState, checkpointing, drawing, recomputing
from cudafuture.pipeline.skip import SkipTracker, use_skip_tracker

__all__ = ["Skip", "Stage", "StageMessage"]

Skip = tuple[Any, str]
"""A namespace and a name: see ``skippable``."""


class StageMessage(NamedTuple):
    """Value of any nesting that is sent between two stages."""

    leaves: list[Any]
    """Each once, even if it is in several places of the value."""
    structure: _pytree.TreeSpec
    indices: list[int]
    """Of the places of the value, among the leaves."""
    needs_gradient: list[bool]
    """For each leaf, whether the sender needs its gradient."""

    @classmethod
    def of(cls, value: Any, needs_gradient: Callable[[torch.Tensor], bool]) -> StageMessage:
        """Return a value split into leaves; its tensors are detached."""
        return cls.split(value, needs_gradient)[0]

    @classmethod
    def split(cls, value: Any, needs_gradient: Callable[[torch.Tensor], bool]) -> tuple[StageMessage, list[Any]]:
        """Return a value split into leaves, and these leaves before they were detached."""
        every, structure = _pytree.tree_flatten(value)
        leaves, indices = distinct(every)
        detached, needs = [], []
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            if not is_tensor:
                _expect_leaf(leaf)
            detached.append(leaf.detach() if is_tensor else leaf)
            needs.append(is_tensor and needs_gradient(leaf))
        return cls(detached, structure, indices, needs), leaves

    def value(self) -> Any:
        """Return the value, assembled from its leaves."""
        return self.value_of(self.leaves)

    def value_of(self, leaves: Sequence[Any]) -> Any:
        """Return the value, assembled from other leaves."""
        return _pytree.tree_unflatten([leaves[i] for i in self.indices], self.structure)


class Sent(NamedTuple):
    """Results of a forward cell: the input of the next stage, and the skips."""

    message: StageMessage
    stashed: dict[Skip, StageMessage]
    """Of one leaf each, which may be None."""


class _StageStart(torch.autograd.Function):
    """Start of a stage's graph. In backward it keeps the gradient of a received tensor."""

    @staticmethod
    def forward(
        ctx: Any, start: torch.Tensor, gradients: dict[Any, torch.Tensor | None], key: Any, received: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients, ctx.key = gradients, key
        ctx.set_materialize_grads(False)
        return received.detach()  # neither a view of it nor a leaf, so the stage may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.gradients[ctx.key] = gradients[0]
        return (None,) * 4


@dataclass
class _Saved:
    """State of a micro-batch in a stage, from its forward cell to its last cell."""

    received: StageMessage
    popped: dict[Skip, StageMessage]
    target: Any
    weight: float | torch.Tensor
    start: torch.Tensor = field(default_factory=lambda: phony(torch.device("cpu"), requires_grad=True))
    roots: dict[Any, GradientEdge] = field(default_factory=dict)
    """The edges at which backward begins, by the index of the leaf sent, by the skip, or "loss"."""
    gradients: dict[Any, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of the received values, by the index of the leaf or by the skip."""
    random: RandomState | None = None
    """The generators' states before the forward cell; None: the stage kept its graph and recomputes nothing."""
    weight_part: WeightPart | None = None

    def forget_inputs(self) -> None:
        """Drop the inputs of a second forward pass; the graph keeps those that backward needs."""
        self.received = self.received._replace(leaves=[])
        self.popped, self.target = {}, None


class Stage:
    """Part of a model on one device.

    Args:
        index: of the stage, from 0.
        module: called with one value, as the parts of an nn.Sequential are.
        device: of the module.
        loss: of the last stage, ``loss(output)`` or ``loss(output, target)``; None: not the last stage.
    """

    def __init__(
        self, index: int, module: torch.nn.Module, device: torch.device, loss: Callable[..., torch.Tensor] | None
    ) -> None:
        self.index, self.module, self.device, self.loss = index, module, device, loss
        self._saved: dict[int, _Saved] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self._changes_input: bool | None = None  # in place; None: not known yet

    # ---- cells

    def forward(
        self,
        microbatch: int,
        received: StageMessage,
        popped: dict[Skip, StageMessage],
        target: Any,
        weight: float | torch.Tensor,
        is_checkpointed: bool,
        draws_alone: bool,
    ) -> Sent:
        """Run the module for a micro-batch, and keep the state for its backward: the graph, or the inputs.

        Args:
            microbatch: its index.
            received: the input, on this device.
            popped: the skips from other stages.
            target: of the loss, in the last stage; None: the loss takes none.
            weight: factor of the loss.
            is_checkpointed: drop the graph, and recompute it in backward.
            draws_alone: other threads draw random numbers that they must draw again.
        """
        saved = self._saved[microbatch] = _Saved(received, popped, target, weight)
        if is_checkpointed:
            sent, loss = self._run_checkpointed(saved)
        else:
            with drawing() if draws_alone else nullcontext():
                sent, loss = self._run(saved, self.loss, _Given(saved, False))
            saved.forget_inputs()
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        return sent

    def infer(self, received: StageMessage, popped: dict[Skip, StageMessage]) -> Sent:
        """Run the module for a micro-batch without a loss and without a graph; keep nothing."""
        with torch.no_grad():
            saved = _Saved(received, popped, None, 1.0)
            return self._run(saved, None, _Given(saved, False))[0]

    def backward(self, microbatch: int, gradients: Mapping[Any, torch.Tensor | None]) -> dict[Any, torch.Tensor | None]:
        """Accumulate the gradients of the parameters; return those of the received values.

        `gradients` are those of the sent values, by the index of the leaf or by the skip.
        """
        saved = self._with_graph(microbatch)
        roots, given = _given(saved, gradients)
        if roots:
            with _without_autocast(self.device):
                torch.autograd.backward(roots, given)
        del self._saved[microbatch]
        return _apart_from_parameters(saved.gradients, frozenset())

    def input_gradient(
        self, microbatch: int, gradients: Mapping[Any, torch.Tensor | None]
    ) -> dict[Any, torch.Tensor | None]:
        """Return the gradients of the received values. ``weight_gradient`` must follow."""
        saved = self._with_graph(microbatch)
        roots, given = _given(saved, gradients)
        with _without_autocast(self.device):
            saved.weight_part = input_gradient(roots, given, saved.start) if roots else None
        saved.roots = {}
        kept = saved.weight_part.storages() if saved.weight_part is not None else frozenset[int]()
        return _apart_from_parameters(saved.gradients, kept)

    def weight_gradient(self, microbatch: int) -> None:
        """Accumulate the gradients of the parameters."""
        part = self._saved[microbatch].weight_part
        if part is not None:
            with _without_autocast(self.device):
                part.run()
        del self._saved[microbatch]

    def reset(self) -> None:
        """Drop the state of all micro-batches."""
        self._saved = {}
        self.losses = {}

    # ---- inside a cell

    def _run_checkpointed(self, saved: _Saved) -> tuple[Sent, torch.Tensor | None]:
        """Run the module without a graph, and keep its inputs unchanged for the recomputation."""
        protects = self._changes_input is not False  # not known yet, or it does
        given = _Given(saved, protects)
        with checkpointing(), torch.no_grad():
            saved.random = RandomState.capture(self.device)
            sent, loss = self._run(saved, self.loss, given)
        changed = given.changed()
        if changed:
            if not protects:
                raise RuntimeError(
                    f"stage {self.index} changes its {' and its '.join(changed)} in place, but did not before: do so "
                    "always, or never"
                )
            self._changes_input = True
        elif self._changes_input is None:
            self._changes_input = False
        return sent, loss

    def _with_graph(self, microbatch: int) -> _Saved:
        saved = self._saved[microbatch]
        if saved.random is not None:
            with recomputing(saved.random), torch.enable_grad():
                self._run(saved, self.loss, _Given(saved, bool(self._changes_input)))
            saved.forget_inputs()
        return saved

    def _run(
        self, saved: _Saved, loss_of: Callable[..., torch.Tensor] | None, given: _Given
    ) -> tuple[Sent, torch.Tensor | None]:
        """Run the module on the received values, and the loss on its result; record the roots of the graph."""
        with use_skip_tracker(given):
            value = self.module(given.value())
        loss = None
        if loss_of is not None:
            loss = loss_of(value) if saved.target is None else loss_of(value, given.target())
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError(f"a loss returns a tensor with one element, not {_described(loss)}")
            # A mean over nothing is NaN, and so would be its gradient.
            loss = loss * saved.weight if saved.weight != 0.0 else torch.zeros_like(loss.detach())
        given.refuse_overlap(f"stage {self.index}")
        has_graph = torch.is_grad_enabled()
        needs_gradient = self._needs_gradient(saved, has_graph)
        message, leaves = StageMessage.split(value, needs_gradient)
        if has_graph:
            roots: dict[Any, Any] = {"loss": loss} if loss is not None else dict(enumerate(leaves))
            for key, tensor in (roots | given.stashed).items():
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    saved.roots[key] = get_gradient_edge(tensor)
        return Sent(message, _stashed(given.stashed, message, needs_gradient)), loss

    def _needs_gradient(self, saved: _Saved, has_graph: bool) -> Callable[[torch.Tensor], bool]:
        """Return a function that returns whether a tensor of the stage needs a gradient, or may need one."""
        if has_graph:
            return lambda tensor: tensor.requires_grad
        received = [saved.received, *saved.popped.values()]
        may = any(need for message in received for need in message.needs_gradient)
        may = may or any(parameter.requires_grad for parameter in self.module.parameters())
        return lambda tensor: may and (tensor.is_floating_point() or tensor.is_complex())


class _Given(SkipTracker):
    """Input of one run of a stage, and the skips that the run pops and stashes.

    Args:
        saved: of the micro-batch.
        protects: give copies, since the stage changes its input in place, or may do so.
    """

    def __init__(self, saved: _Saved, protects: bool) -> None:
        super().__init__()
        self._saved, self._protects = saved, protects
        self._lent: dict[str, list[tuple[torch.Tensor, torch.Tensor, int]]] = {"input": [], "target": []}
        # Of each, the tensor that is kept, the one that is given, and the version of that before the run.
        self.stashed: dict[Skip, torch.Tensor | None] = {}

    def value(self) -> Any:
        """Return the input."""
        received = self._saved.received
        leaves = zip(received.leaves, received.needs_gradient, strict=True)
        given = [self._give(i, leaf, needs) for i, (leaf, needs) in enumerate(leaves)]
        return received.value_of(given)

    def target(self) -> Any:
        """Return the target, which the loss may change in place."""
        leaves, structure = _pytree.tree_flatten(self._saved.target)
        return _pytree.tree_unflatten(with_each(leaves, lambda leaf: self._lend(leaf, "target")), structure)

    def changed(self) -> list[str]:
        """Return "input", "target", both or neither: what the stage and its loss have changed in place."""
        return [what for what, lent in self._lent.items() if any(map(_has_changed, lent))]

    def refuse_overlap(self, name: str) -> None:
        """Raise RuntimeError if autograd or a copy has hidden a change of one tensor from another one."""
        if self._protects or torch.is_grad_enabled():
            for lent in self._lent.values():
                if len(lent) > 1:
                    refuse_overlap([kept for kept, _, _ in lent], [_has_changed(each) for each in lent], name)

    def save(self, batch: Any, ns: Any, name: str, tensor: torch.Tensor | None) -> None:
        """Keep a tensor that a module stashes."""
        self.stashed[ns, name] = tensor

    def load(self, batch: Any, ns: Any, name: str) -> torch.Tensor | None:
        """Return a tensor that a module pops."""
        skip = (ns, name)
        if skip in self.stashed:  # inside this stage
            return self.stashed.pop(skip)
        popped = self._saved.popped[skip]
        given: torch.Tensor | None = self._give(skip, popped.leaves[0], popped.needs_gradient[0])
        return given

    def _give(self, key: Any, leaf: Any, needs_gradient: bool) -> Any:
        given = self._lend(leaf, "input")
        if not needs_gradient or not torch.is_grad_enabled():
            return given
        return _StageStart.apply(self._saved.start, self._saved.gradients, key, given)  # type: ignore[no-untyped-call]

    def _lend(self, leaf: Any, what: str) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        given = leaf.clone() if self._protects else leaf.detach()
        self._lent[what].append((leaf, given, version_of(given)))
        return given


def _has_changed(lent: tuple[torch.Tensor, torch.Tensor, int]) -> bool:
    _, given, version = lent
    return version_of(given) != version


def _given(
    saved: _Saved, gradients: Mapping[Any, torch.Tensor | None]
) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
    """Return the roots that have a gradient, and the gradients; the loss is its own root."""
    if "loss" in saved.roots:
        gradients = {**gradients, "loss": None}
    keys = [key for key in saved.roots if key == "loss" or gradients.get(key) is not None]
    return [saved.roots[key] for key in keys], [gradients[key] for key in keys]


def _apart_from_parameters(
    gradients: dict[Any, torch.Tensor | None], kept: frozenset[int]
) -> dict[Any, torch.Tensor | None]:
    """Return gradients whose memory no other tensor has; `kept`: storages of which parameters may get a part later.

    A sum over one row is a view, and may have become the gradient of a parameter, to which the next micro-batch adds.
    """
    return {
        key: gradient.clone() if gradient is not None and _is_shared(gradient, kept) else gradient
        for key, gradient in gradients.items()
    }


def _is_shared(tensor: torch.Tensor, kept: frozenset[int]) -> bool:
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    return storage._cdata in kept or torch._C._storage_Use_Count(storage._cdata) > 2  # its tensor and its own object


def _stashed(
    stashed: Mapping[Skip, torch.Tensor | None], message: StageMessage, needs_gradient: Callable[[torch.Tensor], bool]
) -> dict[Skip, StageMessage]:
    """Return the skips as messages, with memory apart from that of the stage's message."""
    if not stashed:
        return {}
    sent = {leaf.untyped_storage()._cdata for leaf in message.leaves if isinstance(leaf, torch.Tensor)}
    return {skip: _apart(StageMessage.of(x, needs_gradient), sent) for skip, x in stashed.items()}


def _apart(message: StageMessage, others: set[int]) -> StageMessage:
    """Return the message with its own memory: the next stage may change its input in place."""
    leaf = message.leaves[0]
    if leaf is None or leaf.untyped_storage()._cdata not in others:
        return message
    return message._replace(leaves=[leaf.clone()])


_PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str, bytes)


def _expect_leaf(leaf: Any) -> None:
    """Raise TypeError for an object with tensors that pytree does not split, so that they would not be copied."""
    if isinstance(leaf, _PLAIN):
        return
    parts = leaf if isinstance(leaf, (set, frozenset)) else getattr(leaf, "__dict__", {}).values()
    if any(isinstance(part, torch.Tensor) for part in parts):
        raise TypeError(
            f"a {type(leaf).__name__} with tensors cannot go from stage to stage; register its class with "
            "torch.utils._pytree, for a dataclass by torch.utils._pytree.register_dataclass"
        )


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a scope for backward without the program's autocast: operations have the dtypes of their forward."""
    kinds = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    scope = ExitStack()
    for kind in kinds:
        scope.enter_context(torch.autocast(kind, enabled=False))
    return scope


def _described(value: object) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
