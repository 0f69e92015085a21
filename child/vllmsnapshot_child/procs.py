"""Processes as /proc shows them, and the few things done to many of them at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Process(NamedTuple):
    """One line of /proc/PID/stat, as far as anybody here needs it."""

    pid: int
    state: str
    ppid: int
    session: int


def find(pid: int) -> Process | None:
    """The process `pid`, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            raw = f.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in brackets and may hold anything, brackets and spaces too: the last bracket ends it.
    state, ppid, _, session, *_ = raw[raw.rindex(b")") + 2 :].split()
    return Process(pid, state.decode(), int(ppid), int(session))


def every() -> Iterator[Process]:
    """Every process of the PID namespace that /proc belongs to."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = find(int(name))
            if process is not None:
                yield process


def others() -> list[Process]:
    """All that must be gone before a new start: for PID 1 the rest of its namespace, for anybody else its descendants.

    A zombie whose parent is not ours to wait for (`kubectl exec` has its parent outside) is as good as gone.
    """
    me = os.getpid()
    found = list(every())
    if me != 1:
        ours = {me}
        grown = True
        while grown:
            more = {p.pid for p in found if p.ppid in ours} - ours
            ours |= more
            grown = bool(more)
        found = [p for p in found if p.pid in ours]
    return [p for p in found if p.pid != me and (p.state not in "ZX" or p.ppid == me)]


def in_session(session: int) -> list[int]:
    """The live processes of a session, without the caller."""
    me = os.getpid()
    return [p.pid for p in every() if p.session == session and p.pid != me and p.state not in "ZX"]


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each of them that is still there."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


def kill(pids: Iterable[int]) -> None:
    """SIGKILL works on stopped processes too, no SIGCONT needed."""
    send(pids, signal.SIGKILL)
