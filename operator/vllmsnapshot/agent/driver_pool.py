"""The processes that call the GPU's driver for the agent: started when they are needed, kept for the next operation, replaced when they hang or die."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .driver import DriverError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds within which the driver must answer; then its helper is killed."""

    start: float = 60.0
    query: float = 15.0
    lock: float = 20.0
    """Told to the driver too, which then leaves the process running."""
    lock_grace: float = 5.0
    move: float = 300.0
    """Checkpoint and restore: up to all of the GPU's memory is copied."""
    unlock: float = 20.0
    end: float = 5.0


class UnusableError(DriverError):
    """No helper can be started: there is no driver, or it does not initialise."""


class LateError(DriverError):
    """The driver did not answer within the limit of the call."""


class OutOfTimeError(DriverError):
    """The time of the whole operation is up."""


Wait = Callable[[socket.socket, float], bool]
"""Wait until there is something to read, at most so many seconds; False if there is not."""


def readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Helper:
    """One helper process. After any DriverError without a code it must be ended."""

    def __init__(self, env: Mapping[str, str], wait: Wait) -> None:
        self._wait = wait
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                # -S: no site-packages, hence no third-party code.
                [sys.executable, "-S", "-m", "vllmsnapshot.agent.driver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**env, "PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self._socket = ours

    def call(self, op: str, limit_s: float, **args: Any) -> Any:
        """One call of the driver. Raises DriverError."""
        deadline = time.monotonic() + limit_s
        what = f"{op} of process {args['pid']}" if "pid" in args else op
        try:
            self._socket.sendall(json.dumps({"op": op, **args}).encode() + b"\n")
            answer = self._receive(deadline)
        except OSError as e:
            answer, error = b"", f": {e.strerror}"
        else:
            error = ""
        if answer is None:
            raise LateError(f"{what} took longer than {limit_s:.3g} s")
        if not answer:
            raise DriverError(f"{what}: the helper of the driver died{error}")
        message = json.loads(answer)
        if "error" in message:
            raise DriverError(f"{what}: {message['error']}", message.get("code"))
        return message["result"]

    def _receive(self, deadline: float) -> bytes | None:
        """A line; empty if the helper has died, None if the time has ended."""
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not self._wait(self._socket, left):
                return None
            piece = self._socket.recv(1 << 16)
            if not piece:
                return b""
            data += piece
        return data

    def end(self, limit_s: float) -> bool:
        """Kill it; False if it does not die in time, as a process does that is stuck inside the driver."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def gone(self) -> bool:
        """Whether it has died by itself; reaps it."""
        return self._process.poll() is not None


class Session:
    """The driver for one operation: a helper, and another one after that has hung or died."""

    def __init__(self, owner: Helpers, timeout_s: float) -> None:
        self._owner = owner
        self._helper: Helper | None = None
        self._deadline = time.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds that the operation still has."""
        return self._deadline - time.monotonic()

    def no_deadline(self) -> None:
        """From now on only the calls' own limits count: the way back must not be cut short by what was spent on the way there."""
        self._deadline = math.inf

    def call(self, op: str, limit_s: float, **args: Any) -> Any:
        """One call, within its own limit and what the operation has left. Raises DriverError."""
        left = self.left()
        if left <= 0:
            raise OutOfTimeError(f"no time is left for {op}")
        if self._helper is None:
            self._helper = self._owner.take(left)
            left = max(0.0, self.left())
        try:
            return self._helper.call(op, min(limit_s, left), **args)
        except DriverError as e:
            if e.code is None:
                self._drop()
            if isinstance(e, LateError) and left < limit_s:
                raise OutOfTimeError(f"{e}, which was all that was left") from e
            raise
        except BaseException:
            # An answer may still be on its way: the next call would take it for its own.
            self._drop()
            raise

    def _drop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            self._owner.end(helper)

    def close(self) -> None:
        """Leave the helper to the next operation."""
        helper, self._helper = self._helper, None
        if helper is not None:
            self._owner.give(helper)


class Helpers:
    """All helpers of one agent. `env` is their environment; may be used from several threads."""

    def __init__(self, env: Mapping[str, str], limits: Limits, wait: Wait = readable) -> None:
        self._env, self._limits, self._wait = env, limits, wait
        self._mutex = threading.Lock()
        self._idle: list[Helper] = []
        self._undead: list[Helper] = []
        self.started = 0
        """Helpers started so far."""

    def take(self, left_s: float) -> Helper:
        with self._mutex:
            self._undead = [h for h in self._undead if not h.gone()]
            while self._idle:
                helper = self._idle.pop()
                if not helper.gone():
                    return helper
                helper.end(0)
            self.started += 1
        helper = Helper(self._env, self._wait)
        try:
            helper.call("Init", min(self._limits.start, left_s))
        except DriverError as e:
            self.end(helper)
            raise UnusableError(f"the driver cannot be used: {e}") from e
        except BaseException:
            self.end(helper)
            raise
        return helper

    def give(self, helper: Helper) -> None:
        with self._mutex:
            self._idle.append(helper)

    def end(self, helper: Helper) -> None:
        if not helper.end(self._limits.end):
            log.error("a helper of the GPU driver does not die; it is left behind")
            with self._mutex:
                self._undead.append(helper)

    def close(self) -> None:
        """End the helpers that wait for work."""
        with self._mutex:
            idle, self._idle = self._idle, []
        for helper in idle:
            self.end(helper)

    @contextlib.contextmanager
    def session(self, timeout_s: float = math.inf) -> Iterator[Session]:
        session = Session(self, timeout_s)
        try:
            yield session
        finally:
            session.close()
