"""Flags of a recomputed forward pass, under the names of ``torchgpipe.checkpoint``."""

from cudafuture.pipeline.checkpoint import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
