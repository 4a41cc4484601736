"""The library's logger, for the native core."""

from __future__ import annotations

import logging

__all__ = ["error"]

_logger = logging.getLogger("cudafuture.future")


def error(message: str, subject: object, exception: BaseException) -> None:
    """Log an exception that no caller can receive; `message` has one placeholder, for the `subject`."""
    _logger.error(message, subject, exc_info=exception)
