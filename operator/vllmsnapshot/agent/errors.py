"""Errors of the node operations. Each carries a reason (a constant of the API) and a message that names what was found."""

from __future__ import annotations


class AgentError(Exception):
    """A node operation failed. `reason` is a constant of `api.constants.Reason`; `message` is for people and bounded."""

    def __init__(self, reason: str, message: str) -> None:
        message = message[:4000]
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class CaptureError(AgentError):
    """A capture failed; the tree runs on, unless the reason is GPU_STATE_LOST."""


class RestoreError(AgentError):
    """A restore failed; nothing of the tree is left in the container."""


class StoreError(AgentError):
    """An artifact is missing, damaged or in use, or the store cannot be written."""
