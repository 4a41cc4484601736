"""API of torchgpipe and fairscale's pipe: ``GPipe``, the modules of its layers, and workers with queues."""

from cudafuture.compat.torchgpipe import balance, batchnorm, checkpoint, microbatch, skip, stream, worker
from cudafuture.compat.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from cudafuture.compat.torchgpipe.gpipe import GPipe
from cudafuture.graph_breaks import break_graphs

__all__ = [
    "GPipe",
    "balance",
    "batchnorm",
    "checkpoint",
    "is_checkpointing",
    "is_recomputing",
    "microbatch",
    "skip",
    "stream",
    "worker",
]

# Not batchnorm and skip: their layers are in modules that a program may compile.
break_graphs(GPipe)
break_graphs(*(vars(m)[name] for m in (balance, checkpoint, microbatch, stream, worker) for name in m.__all__))
