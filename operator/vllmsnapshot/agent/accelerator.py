"""What an accelerator needs around a dump and a restore: its memory is not in the process image unless somebody puts it there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .containers import Container, Process


class Accelerator(Protocol):
    """Called by capture and restore with processes of the tree, the root first. Methods raise AgentError where they fail.

    `recorded` is what `record` returned when the artifact was made. `timeout_s` (seconds) is what the capture or restore has left.
    """

    name: str

    def facts(self) -> Mapping[str, str]:
        """What a restore compares for equality: driver, device model. Empty where there is no device."""

    def claims(self, device: str) -> bool:
        """Whether an open device file (its path in the container) belongs to this accelerator and is handled by it."""

    def record(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> Mapping[str, str]:
        """What a restore must know of these processes, but not compare (names: environment.RECORDED). Refuses what cannot travel."""

    def before_dump(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> None:
        """Move the state of the device into the processes' memory and let go of the device."""

    def after_dump(self, processes: Sequence[Process]) -> None:
        """Undo `before_dump`, after a dump or a failed one, when the processes run again. Must not fail half-way silently.

        Raises CaptureError(GPU_STATE_LOST) if they do not: then the replica is of no use any more and must be ended.
        """

    def before_restore(self, container: Container, recorded: Mapping[str, str], *, timeout_s: float = math.inf) -> None:
        """Insist that the container's device can take the state."""

    def after_restore(
        self, container: Container, recorded: Mapping[str, str], processes: Sequence[Process], *, timeout_s: float = math.inf
    ) -> None:
        """Take the device again and move the state back."""

    def before_terminate(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> None:
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

    def record(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def before_dump(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> None:
        """Nothing."""

    def after_dump(self, processes: Sequence[Process]) -> None:
        """Nothing."""

    def before_restore(self, container: Container, recorded: Mapping[str, str], *, timeout_s: float = math.inf) -> None:
        """Nothing."""

    def after_restore(
        self, container: Container, recorded: Mapping[str, str], processes: Sequence[Process], *, timeout_s: float = math.inf
    ) -> None:
        """Nothing."""

    def before_terminate(self, processes: Sequence[Process], *, timeout_s: float = math.inf) -> None:
        """Nothing."""
