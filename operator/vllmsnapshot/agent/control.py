"""The control volume of one pod as the agent reads it: one snapshot of all files, believed only after every check."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import (
    Ending,
    Failed,
    Hello,
    Hold,
    Message,
    Oracle,
    ProtocolError,
    Ready,
    Release,
    Restored,
    Serving,
    Start,
)

from ..api import constants as c

M = TypeVar("M", bound=Message)


def control_path(kubelet_dir: str, pod_uid: str) -> str:
    """Where the control volume of a pod is on the host."""
    return os.path.join(kubelet_dir, "pods", pod_uid, "volumes", "kubernetes.io~empty-dir", c.CONTROL_VOLUME)


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of the incarnation that `hello` names. A file that cannot be believed is None and has an entry in `problems`.

    `at` holds modification times (Unix seconds): they are the clock of the report, because they outlive the agent.
    """

    hello: Hello | None = None
    start: Start | None = None
    hold: Hold | None = None
    ready: Ready | None = None
    release: Release | None = None
    restored: Restored | None = None
    serving: Serving | None = None
    failed: Failed | None = None
    ending: Ending | None = None
    at: Mapping[str, float] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    restore_phases: Mapping[str, float] = field(default_factory=dict)
    restore_oracle: Oracle | None = None

    @property
    def incarnation(self) -> str:
        """The present incarnation, empty if there is none."""
        return self.hello.incarnation if self.hello else ""


def read_files(path: str) -> Files | None:
    """Read all control files; None if there is no control volume (not made yet, or gone with the pod). Never raises."""
    try:
        with protocol.open_dir(path) as fd:
            return _read(fd)
    except OSError:
        return None


def _read(fd: int) -> Files:
    problems: dict[str, str] = {}
    at: dict[str, float] = {}

    def load(kind: type[M], incarnation: str | None) -> M | None:
        try:
            message = kind.load(fd, incarnation)
            if message is not None:
                at[kind.FILE] = os.stat(kind.FILE, dir_fd=fd, follow_symlinks=False).st_mtime
        except (ProtocolError, OSError) as e:
            problems[kind.FILE] = str(e)[:1000]
            return None
        return message

    hello = load(Hello, None)
    if hello is None or not hello.incarnation:
        return Files(problems=problems)
    word = hello.incarnation
    restored = load(Restored, word)
    phases, oracle = _extras(fd) if restored else ({}, None)
    return Files(
        hello=hello,
        start=load(Start, word),
        hold=load(Hold, word),
        ready=load(Ready, word),
        release=load(Release, word),
        restored=restored,
        serving=load(Serving, word),
        failed=load(Failed, word),
        ending=load(Ending, word),
        at=at,
        problems=problems,
        restore_phases=phases,
        restore_oracle=oracle,
    )


def _extras(fd: int) -> tuple[dict[str, float], Oracle | None]:
    """What the agent noted in restored.json for itself (init ignores it): phases and the recorded answer."""
    try:
        raw = protocol.read(fd, protocol.RESTORED) or {}
        oracle = Oracle.from_dict(raw["oracle"], "restored.json: oracle") if raw.get("oracle") is not None else None
    except (ProtocolError, OSError):
        return {}, None
    phases = raw.get("phases")
    if not isinstance(phases, dict):
        return {}, oracle
    return {str(k)[:63]: float(v) for k, v in list(phases.items())[:64] if type(v) in (int, float) and abs(v) < 1e9}, oracle


def write_restored(fd: int, message: Restored, phases: Mapping[str, float], oracle: Oracle | None) -> None:
    """Tell init that the tree is there, and keep beside it what an agent after us needs to verify and report it."""
    value: dict[str, Any] = {**message.to_dict(), "phases": dict(phases)}
    if oracle is not None:
        value["oracle"] = oracle.to_dict()
    protocol.write(fd, protocol.RESTORED, value)
