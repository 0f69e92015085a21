"""Processes: identity that survives PID reuse, running commands with readable failures."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.cache import write_atomic
from tests.cluster.errors import ClusterError

Argument = str | Path


def boot_id() -> str:
    """The kernel's random identity of this boot: start times are only comparable within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which *pid* started, or None when there is no such live process.

    A zombie counts as gone: it holds no resources that a clean-up could release.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may itself hold blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


@dataclass(frozen=True)
class ProcessRecord:
    """A PID together with what makes it unmistakable."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """Describe the live process *pid*."""
        started = start_time(pid)
        if started is None:
            raise ProcessLookupError(pid)
        return cls(pid, started, boot_id())

    @classmethod
    def load(cls, path: Path) -> ProcessRecord | None:
        """Read a record; None if it is missing or unreadable (a crash may leave either)."""
        try:
            data = json.loads(path.read_text())
            return cls(int(data["pid"]), int(data["started"]), str(data["boot"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Write the record atomically."""
        write_atomic(path, json.dumps(asdict(self)))

    def alive(self) -> bool:
        """Whether exactly this process, not a later one with its PID, is still running."""
        return self.boot == boot_id() and start_time(self.pid) == self.started

    def kill(self, *, timeout: float = 20.0) -> None:
        """Send SIGKILL to exactly this process and wait until it is gone."""
        if self.boot != boot_id():
            return
        try:
            # A pidfd cannot be handed to a successor; the start time is checked after it is open.
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.alive():
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            deadline = time.monotonic() + timeout
            while self.alive():
                if time.monotonic() > deadline:
                    raise ClusterError(f"process {self.pid} did not end within {timeout:.0f} s of SIGKILL")
                time.sleep(0.02)
        finally:
            os.close(handle)


def contained(command: Sequence[Argument]) -> list[str]:
    """*command* in mount and PID namespaces of its own, so that it cannot outlive its caller or leave a mount behind.

    It dies with the calling thread, even by SIGKILL, and takes its children along. Only root can do this; for others
    the command stays as it is.
    """
    argv = [str(part) for part in command]
    if os.geteuid() != 0:
        return argv
    namespaces = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    return ["setpriv", "--pdeathsig", "KILL", *namespaces, "--", *argv]


def run(
    command: Sequence[Argument],
    *,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    timeout: float | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run *command* and return its output; on failure raise with the command and the end of what it said."""
    argv = [str(part) for part in command]
    data = stdin.decode() if isinstance(stdin, bytes) else stdin
    environment = None if env is None else {**os.environ, **env}
    standard_input = subprocess.DEVNULL if data is None else None
    try:
        if log is None:
            result = subprocess.run(
                argv,
                input=data,
                stdin=standard_input,
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                cwd=cwd,
                timeout=timeout,
                check=False,
            )
            tail = (result.stdout + result.stderr)[-4000:]
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as handle:
                result = subprocess.run(
                    argv,
                    input=data,
                    stdin=standard_input,
                    stdout=handle,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                    cwd=cwd,
                    timeout=timeout,
                    check=False,
                )
            tail = tail_of(log)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"timed out after {timeout:.0f} s: {shlex.join(argv)}") from error
    except FileNotFoundError as error:
        raise ClusterError(f"not found: {argv[0]}") from error
    if check and result.returncode != 0:
        raise ClusterError(f"exit status {result.returncode}: {shlex.join(argv)}\n{tail.strip()}")
    return result


def tail_of(path: Path, limit: int = 4000) -> str:
    """The last *limit* bytes of a text file, or nothing if it cannot be read."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - limit))
            return handle.read().decode(errors="replace")
    except OSError:
        return ""
