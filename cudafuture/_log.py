"""The library's logger, for the native core and the pool of ``submit``."""

from __future__ import annotations

import logging

__all__ = ["error", "warning"]

_logger = logging.getLogger("cudafuture.future")


def error(message: str, subject: object, exception: BaseException) -> None:
    """Log an exception that no caller can receive; `message` has one placeholder, for the `subject`."""
    _logger.error(message, subject, exc_info=exception)


def warning(message: str, text: str) -> None:
    """Log a warning; `message` has one placeholder, for the `text`."""
    _logger.warning(message, text)
