"""Deferred batch normalisation, under the names of ``torchgpipe.batchnorm``."""

from cudafuture.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm

__all__ = ["DeferredBatchNorm", "convert_deferred_batch_norm"]
