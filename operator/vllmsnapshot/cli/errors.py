"""What can go wrong, as one line that names the remedy, and an exit status."""

from __future__ import annotations

from enum import IntEnum

from ..kube import ApiError


class Exit(IntEnum):
    """Exit statuses; docs/cli.md lists them."""

    OK = 0
    PROBLEM = 1
    """The command worked, and found something wrong."""
    USAGE = 2
    NOT_FOUND = 3
    DENIED = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    INTERRUPTED = 130


class CliError(Exception):
    """Ends the command with this line and this status."""

    def __init__(self, status: Exit, message: str) -> None:
        super().__init__(message)
        self.status = status


def explain(e: ApiError) -> CliError:
    """An answer of the API server, or its silence, in the user's terms."""
    message = " ".join(e.message.split())
    if e.status == 0:
        return CliError(Exit.UNREACHABLE, f"the API server cannot be reached: {message}; check --context and your network")
    if e.status == 401:
        return CliError(Exit.DENIED, "the cluster does not accept your credentials: log in again, or choose another --context")
    if e.status == 403:
        return CliError(Exit.DENIED, f"not permitted: {message}; docs/cli.md lists the rights of each command")
    if e.status == 404:
        return CliError(
            Exit.NOT_FOUND,
            "this cluster does not know VLLMSnapshots: install the chart (docs/install.md), or choose another --context",
        )
    if e.status == 409:
        return CliError(Exit.PROBLEM, f"somebody else changed it at the same time: {message}; try again")
    if e.status in (429, 500, 502, 503, 504):
        return CliError(Exit.UNREACHABLE, f"the API server is in trouble ({e.status} {e.reason}): {message}; try again later")
    return CliError(Exit.PROBLEM, f"the API server refused: {e.status} {e.reason}: {message}")
