"""Errors of the node operations. Each carries a reason (a constant of the API) and a message that names what was found."""

from __future__ import annotations

import errno

from ..api.constants import Reason


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


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota was full. Also told by the text of what happened in another process (CRIU, `nsrun`)."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    text = str(error)
    return "No space left on device" in text or "Disk quota exceeded" in text


def disk_reason(error: OSError) -> str:
    """The reason of a disk that refuses a write: a full one is remedied otherwise than a broken one."""
    return Reason.INSUFFICIENT_DISK if is_full(error) else Reason.STORE_FAILED
