"""Faults of archives and members, and the counts of skipped members."""

from __future__ import annotations

from collections import Counter

from torch.utils.data import get_worker_info

from cudafuture.data._shared_memory import shared_zeros
from cudafuture.errors import ArchiveError

__all__ = ["IGNORED", "REASONS", "Fault", "SkipCounts"]

REASONS = (
    "truncated",
    "damaged",
    "bomb",
    "corrupt",
    "not_an_image",
    "too_large",
    "pixel_format",
    "no_label",
    "unknown_class",
    "link",
    "special_file",
    "ignored",
)
IGNORED = REASONS[-1]  # the reason of a member that no loader of images would take, which is never an error
_WORKERS = 1024


class Fault(Exception):
    """Fault of an archive or of one of its members, before the archive's path and the member's name are known.

    Args:
        reason: one of REASONS.
        text: a description, without the names of the archive and of the member.
        member: the name of the member, if the fault belongs to one.

    `owned` is False if several parts meet the same fault, and another part counts it.
    """

    def __init__(self, reason: str, text: str, member: str = "") -> None:
        super().__init__(text)
        self.reason = reason
        self.member = member
        self.owned = True

    def error(self, path: str) -> ArchiveError:
        """Return the ArchiveError for the user."""
        member = f", member {self.member!r}" if self.member else ""
        return ArchiveError(f"{path}{member}: {self}", path=path, member=self.member, reason=self.reason)


class SkipCounts:
    """Numbers of skipped members, by reason, in memory that DataLoader workers share.

    Each worker adds to its own row, so that no two processes change the same number.
    """

    def __init__(self) -> None:
        self._rows = shared_zeros(_WORKERS + 1, len(REASONS))

    def add(self, reason: str) -> None:
        """Count a skipped member."""
        worker = get_worker_info()
        row = 0 if worker is None else 1 + worker.id % _WORKERS
        self._rows[row, REASONS.index(reason)] += 1

    def total(self) -> Counter[str]:
        """Return the sums over all workers, without the reasons that did not occur."""
        sums = self._rows.sum(dim=0).tolist()
        return Counter({reason: count for reason, count in zip(REASONS, sums, strict=True) if count})
