"""Balance of a sequential model, under the names of ``torchgpipe.balance``."""

from cudafuture.pipeline.balance import balance_by_size, balance_by_time, balance_cost

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]
