"""What PID 1 decides, without doing any of it: looks in, actions out.

`Machine.step` takes one `Look` (everything init can see at one moment) and returns what to do. It keeps no clock and touches
nothing, so every path of "Life of a container" (docs/architecture.md) can be run through in tests. `init.py` is the loop
that looks and acts.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import NamedTuple

from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import Reason

REFUSED_EXIT = 78
"""Exit code for a start that the snapshot's policy forbids (EX_CONFIG)."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
"""Signals that begin the end, and end it at once when another one follows; the others are passed on and nothing else."""

MAX_RESTORES = 3
"""After so many failed restores in one container init asks nobody any more."""

UNFIT_FOR_BARRIER = (Reason.REHEARSAL_MISMATCH, Reason.RELOAD_FAILED, Reason.CANARY_FAILED)
"""Failures that only the barrier brings about: plain vLLM would have served, so a cold start without barrier follows."""


class Policy(NamedTuple):
    """What the pod's environment says."""

    decision_timeout_s: float = 10.0
    term_grace_s: float = protocol.TERM_GRACE_S
    self_release_s: float = 60.0
    foreign_server: bool = False  # a server with vLLM's barrier only: it knows neither --unattended nor serving.json


class Hold(NamedTuple):
    """A hold.json; `version` changes with each new file."""

    version: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """What there is to see at `now` (monotonic seconds). Files that `Machine.wants` does not name may be left out."""

    now: float
    start: protocol.Start | None = None
    restored: protocol.Restored | None = None
    hold: Hold | None = None
    ready: bool = False
    released: bool = False
    serving: bool = False
    exited: int | None = None  # exit code of the main process, once it is gone
    failure: tuple[str, str] | None = None  # reason and message of failed.json
    attends_end: bool = False  # the agent wants to end the server; looked at when there are signals
    ending: protocol.Ending | None = None  # looked at when the server is gone or has been told to go
    signals: tuple[int, ...] = ()


class Act(NamedTuple):
    """One thing to do. `verb` is one of the constants below; the other fields are its arguments."""

    verb: str
    message: str = ""
    attended: bool = False
    pid: int = 0
    number: int = 0  # a signal, or an exit code


HELLO = "hello"  # new incarnation: clear control files and scratch, write hello.json with Machine.failed_restores
CLAIM = "claim"  # write start.json {cold, unattended} unless the agent has: a late one must not restore beside a cold start
SERVER = "server"  # start the server; attended: with the barrier
ADOPT = "adopt"  # the tree whose root is `pid` is the main process from now on
KILL_ALL = "kill-all"  # SIGKILL everything but PID 1 and wait until it is gone
FORWARD = "forward"  # pass signal `number` on: one that stops to the server alone, others to its whole session
RELEASE = "release"  # SIGCONT the session, then write release.json unless somebody has
LOG = "log"
EXIT = "exit"


@dataclass(kw_only=True)
class _Run:
    """One server, from its start (or its restore) to its end."""

    attended: bool
    content: str | None = None  # restored from this
    serve_within_s: float = 0.0  # a restored one, after its release
    ready_at: float | None = None
    released_at: float | None = None
    serving: bool = False
    hold: tuple[Hold, float] | None = None  # and when it was first seen
    said: bool = False  # the self-release is in the log


DECIDING, RESTORING, RUNNING, DONE = "deciding", "restoring", "running", "done"


class Machine:
    """The life of one container. Call `begin` once, then `step` after each look."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.phase = DECIDING
        self.failed_restores: dict[str, str] = {}
        self._restores = 0
        self._claimed = False
        self._deadline = 0.0  # of the decision or the restore
        self._start: protocol.Start | None = None
        self._run = _Run(attended=False)
        self._stop_by: float | None = None

    # --- what the loop asks ---

    def begin(self, now: float, *, control: bool = True) -> list[Act]:
        """The first actions. Without a control volume nobody can answer, so the engine starts as plain vLLM would."""
        return self._ask(now) if control else self._cold(attended=False, why="no control volume")

    def wants(self) -> tuple[str, ...]:
        """The control files that matter now."""
        if self.phase == DECIDING:
            return (protocol.START,)
        if self.phase == RESTORING:
            return (protocol.START, protocol.RESTORED)
        if self.phase != RUNNING or self._settled():
            return ()
        if self._run.released_at is None:
            return (protocol.READY, protocol.HOLD, protocol.RELEASE, protocol.SERVING)
        return (protocol.SERVING,)

    @property
    def stopping(self) -> bool:
        """Whether the end has begun."""
        return self._stop_by is not None

    def pause(self, now: float) -> float | None:
        """Seconds until the next look is due; None: only a signal (or the death of a child) needs one."""
        if self._stop_by is not None:
            return max(0.0, self._stop_by - now)
        if self.phase == DECIDING and self._claimed:
            return 0.0
        if self.phase in (DECIDING, RESTORING):
            return 0.02
        return None if self._settled() else 0.2

    def step(self, look: Look) -> list[Act]:
        """Decide what to do after one look."""
        if self.phase == DONE:
            return []
        acts: list[Act] = []
        if look.serving and self.phase == RUNNING:
            self._run.serving = True
        for number in look.signals:
            acts += self._signal(number, look)
            if self.phase == DONE:
                return acts
        if self.phase == DECIDING:
            acts += self._decide(look)
        elif self.phase == RESTORING:
            acts += self._await_restore(look)
        elif look.exited is not None:
            acts += self._exited(look.exited, look)
        else:
            acts += self._supervise(look)
        return acts

    # --- phases ---

    def _ask(self, now: float) -> list[Act]:
        self.phase = DECIDING
        self._start = None
        self._claimed = False
        self._deadline = now + self.policy.decision_timeout_s
        self._run = _Run(attended=False)
        acts = [Act(HELLO)]
        if self._restores >= MAX_RESTORES:
            acts += self._cold(attended=False, why=f"{self._restores} restores failed in this container")
        return acts

    def _decide(self, look: Look) -> list[Act]:
        if look.start is not None:
            return self._obey(look.start, look.now)
        if look.now < self._deadline:
            return []
        why = f"nobody decided within {self.policy.decision_timeout_s:g} s"
        if not self._claimed:  # and then obey what is there, whoever wrote it
            self._claimed = True
            return [Act(CLAIM, why)]
        return self._cold(attended=False, why=why)

    def _obey(self, start: protocol.Start, now: float) -> list[Act]:
        self._start = start
        if start.mode == "refuse":
            return [*self._clean(), *self._exit(REFUSED_EXIT, f"start refused: {start.reason} {start.message}".rstrip())]
        if start.mode == "restore" and start.content:
            self.phase = RESTORING
            self._deadline = now + start.timeout_s
            return [Act(LOG, f"waiting for a restore of {start.content}")]
        # Also a first decision may follow an attempt that was over before anybody looked: nothing of it may live beside us.
        why = f"{start.reason}: {start.message}" if start.message else start.reason
        return [Act(KILL_ALL), *self._cold(attended=start.attended, why=why)]

    def _await_restore(self, look: Look) -> list[Act]:
        assert self._start is not None
        if look.start is not None and look.start != self._start:
            return self._obey(look.start, look.now)
        if look.restored is not None:
            self.phase = RUNNING
            self._restores += 1
            # The timeout is kept: a tree that was put back also has to serve in time once it is released.
            self._run = _Run(attended=True, content=look.restored.content, serve_within_s=self._start.timeout_s)
            self._run.ready_at = look.now
            return [Act(ADOPT, look.restored.content, pid=look.restored.pid)]
        if look.now >= self._deadline:
            why = f"{self._start.content} was not restored within {self._start.timeout_s:g} s"
            return [Act(KILL_ALL), *self._cold(attended=False, why=why)]
        return []

    def _supervise(self, look: Look) -> list[Act]:
        now = look.now
        if self._stop_by is not None:
            if now < self._stop_by:
                return []
            code = 128 + signal.SIGKILL if look.ending is None else look.ending.exit_code
            return [Act(KILL_ALL), *self._exit(code, "the server did not end in time: killed")]
        if self._settled():
            return []
        if look.released and self._run.released_at is None:
            self._run.released_at = now
        if look.ready and self._run.ready_at is None:
            self._run.ready_at = now
        if look.hold is None:
            self._run.hold = None
        elif self._run.hold is None or self._run.hold[0] != look.hold:
            self._run.hold = (look.hold, now)
        if self._run.released_at is None:
            return self._self_release(now)
        if self._run.content is not None and not self._run.serving and now >= self._run.released_at + self._run.serve_within_s:
            return self._restore_failed(f"NotServing: not serving {self._run.serve_within_s:g} s after its release", now)
        return []

    def _self_release(self, now: float) -> list[Act]:
        if self._run.ready_at is None:
            return []
        if not self._run.attended:  # a foreign server knows the barrier only
            return [Act(RELEASE)]
        if self._run.hold is not None:
            held, since = self._run.hold
            due, why = since + held.timeout_s, f"held for {held.timeout_s:g} s"
        else:
            due, why = self._run.ready_at + self.policy.self_release_s, f"ready for {self.policy.self_release_s:g} s"
        if now < due:
            return []
        logged, self._run.said = self._run.said, True
        return [*([] if logged else [Act(LOG, f"{why} and nobody released the server: releasing it")]), Act(RELEASE)]

    def _exited(self, code: int, look: Look) -> list[Act]:
        how = f"{look.failure[0]}: {look.failure[1]}" if look.failure else _meaning(code)
        if look.ending is not None and (self._stop_by is not None or self._run.serving):
            # The agent kills it. To the kubelet it is the end that it would have had without.
            return [Act(KILL_ALL), *self._exit(look.ending.exit_code, f"server ended as it had announced ({how})")]
        if self._stop_by is not None or self._run.serving:
            return [Act(KILL_ALL), *self._exit(code, f"server ended: {how}")]
        if self._run.content is not None:
            return self._restore_failed(how, look.now)
        before_barrier = self._run.attended and self._run.ready_at is None and not look.ready
        if before_barrier and look.failure and look.failure[0] in UNFIT_FOR_BARRIER:
            return [Act(KILL_ALL), *self._cold(attended=False, why=how)]
        return [Act(KILL_ALL), *self._exit(code, f"server ended before it served: {how}")]

    def _restore_failed(self, why: str, now: float) -> list[Act]:
        assert self._run.content is not None
        self.failed_restores[self._run.content] = why[:1000]
        return [Act(LOG, f"restore of {self._run.content} failed: {why}"), Act(KILL_ALL), *self._ask(now)]

    def _signal(self, number: int, look: Look) -> list[Act]:
        stop = number in STOP_SIGNALS
        if self.phase in (DECIDING, RESTORING):
            return [*self._clean(), *self._exit(128 + number, "stopped before the start")] if stop else []
        # An engine that is to be ended by the agent waits with its GPU for that, however often it is told.
        if stop and self.stopping and not look.attends_end:
            return [Act(KILL_ALL), *self._exit(128 + number, "told twice to end: killed")]
        if stop and self._stop_by is None:
            self._stop_by = look.now + self.policy.term_grace_s
        return [Act(FORWARD, number=number)]

    # --- small parts ---

    def _settled(self) -> bool:
        """Nothing in the control volume can change what init does."""
        if self._run.serving or (self._run.released_at is not None and self._run.content is None):
            return True
        return not self._run.attended and not self.policy.foreign_server

    def _clean(self) -> list[Act]:
        return [Act(KILL_ALL)] if self.phase == RESTORING else []

    def _cold(self, *, attended: bool, why: str) -> list[Act]:
        self.phase = RUNNING
        self._run = _Run(attended=attended)
        return [Act(LOG, f"cold start, {'attended' if attended else 'unattended'}: {why}"), Act(SERVER, attended=attended)]

    def _exit(self, code: int, why: str) -> list[Act]:
        self.phase = DONE
        return [Act(EXIT, why, number=code)]


def _meaning(code: int) -> str:
    """What an exit code says by itself: a restored tree that was never released writes failed.json for another pod."""
    for reason, of_reason in protocol.EXIT_CODES.items():
        if code == of_reason:
            return f"{reason}: exit code {code}"
    return f"exit code {code}"
