"""Room in the store: what artifacts may take, by the quota of the node and by its disk. Pure.

Bytes on the disk, not lengths of files: images have holes. What a capture has been promised counts from the promise on, so two
captures at once do not both get the last room. What it has written by then is no longer free, and is not counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..api.constants import Reason
from .errors import StoreError


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the store takes, and what there is (all in bytes)."""

    artifacts: Mapping[str, int] = field(default_factory=dict)
    """On the disk, by content."""
    writing: int = 0
    """On the disk, of artifacts that are being written."""
    free: int = 0
    """On the file system, for root."""
    quota: int | None = None
    """What all artifacts together may take; None: as much as there is."""
    min_free: int = 0
    """What must stay free on the file system: on a full disk the kubelet evicts pods."""

    @property
    def used(self) -> int:
        """By artifacts."""
        return sum(self.artifacts.values())

    def room(self, promised: int = 0) -> int:
        """What more may be written, beside what is promised; negative where there is too much already."""
        by_disk = self.free - self.min_free - max(0, promised - self.writing)
        return by_disk if self.quota is None else min(by_disk, self.quota - self.used - promised)

    def refusal(self, size: int, evictable: int = 0) -> StoreError:
        """Why there is no room for so much, though so much could be evicted."""
        quota = "none" if self.quota is None else f"{self.quota}"
        return StoreError(
            Reason.INSUFFICIENT_DISK,
            f"the artifact needs {size} bytes; the store has {self.used} (quota {quota}), its disk {self.free} free, of which "
            f"{self.min_free} must stay; evicting what no replica here needs would give {evictable}",
        )
