"""What an accelerator needs around a dump and a restore: its memory is not in the process image unless somebody puts it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .containers import Process


class Accelerator(Protocol):
    """Called by capture and restore with processes of the tree, the root first. Methods raise AgentError where they fail."""

    name: str

    def facts(self) -> Mapping[str, str]:
        """What a restore compares for equality: driver, device model. Empty where there is no device."""

    def claims(self, device: str) -> bool:
        """Whether an open device file (its path in the container) belongs to this accelerator and is handled by it."""

    def before_dump(self, processes: Sequence[Process]) -> None:
        """Move the state of the device into the processes' memory and let go of the device."""

    def after_dump(self, processes: Sequence[Process]) -> None:
        """Undo `before_dump`, after a dump or a failed one, when the processes run again. Must not fail half-way silently."""

    def after_restore(self, processes: Sequence[Process]) -> None:
        """Take the device again and move the state back."""

    def before_terminate(self, processes: Sequence[Process]) -> None:
        """Make a half-restored tree safe to kill."""


class Cpu:
    """No accelerator: nothing to do."""

    name = "cpu"

    def facts(self) -> Mapping[str, str]:
        """No device, no facts."""
        return {}

    def claims(self, device: str) -> bool:
        """None."""
        return False

    def before_dump(self, processes: Sequence[Process]) -> None:
        """Nothing."""

    def after_dump(self, processes: Sequence[Process]) -> None:
        """Nothing."""

    def after_restore(self, processes: Sequence[Process]) -> None:
        """Nothing."""

    def before_terminate(self, processes: Sequence[Process]) -> None:
        """Nothing."""
