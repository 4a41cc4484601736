"""The thread on which the offload services of this process go on when the store has done what they asked for.

A callback of the program that blocks the library's callback thread stalls no client.
"""

from __future__ import annotations

from cudafuture import executors

__all__ = ["service_thread"]

service_thread = executors.serial("offload service")
