"""Containers without a runtime: namespaces by unshare, an overlay root, volumes and a pod's cgroup. They need root, no Kubernetes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllmsnapshot.agent.containers import Container, find
from vllmsnapshot.api.constants import CONTROL_VOLUME

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0
"""How long a test waits for a line that must come before it fails."""

SKIPPED_CONTROLLERS = {"cpuset"}
"""Must be set up before a process may enter."""


def prefix() -> Path | None:
    """CRIU's prefix: that of the environment, the agent's image, the developer's own, or what tests/cluster/criu.py built."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    named = os.environ.get("VLLMSNAPSHOT_CRIU_PREFIX")
    places = [*([Path(named)] if named else []), Path("/opt/criu"), Path("~/.cache/vllmsnapshot-dev/criu").expanduser()]
    places += sorted((cache / "vllmsnapshot").glob("criu-*"), key=lambda p: p.stat().st_mtime, reverse=True)
    for place in places:
        if (place / "usr/sbin/criu").exists():
            return place
    return None


class Bare:
    """One container. `lines` of its output come by `line`; closing kills everything and removes all traces."""

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        memory_limit: int | None = None,
        uid: int = 0,
        mounts: Mapping[str, Path] | None = None,
    ) -> None:
        """Start it; it waits for `go` if there is a command (run as user `uid`), and only reaps if there is none.

        `mounts`: files and directories of the machine at paths of the container, such as device files.
        """
        self.uid = str(uuid.uuid4())
        # On tmpfs: an overlay's upper directory must not lie below its lower one, which is the machine's root here.
        self.base = Path(tempfile.mkdtemp(prefix="vllmsnapshot-bare-", dir="/dev/shm"))
        self.base.chmod(0o755)
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._pinned: Container | None = None
        # Named before any is made: whatever comes between is undone.
        self.cgroups = _cgroups(self.uid)
        try:
            for cgroup in self.cgroups:
                cgroup.mkdir(parents=True)
            for name in ("upper", "work", "merged", CONTROL_VOLUME):
                (self.base / name).mkdir()
            self.control.chmod(0o777)
            if memory_limit is not None:
                for cgroup in self.cgroups:
                    for file in ("memory.limit_in_bytes", "memory.max"):
                        if (cgroup / file).exists():
                            (cgroup / file).write_text(str(memory_limit))
            task = json.dumps(
                {
                    "base": str(self.base),
                    "command": list(command),
                    "uid": uid,
                    "control": CONTROL_VOLUME,
                    "mounts": {path: str(source) for path, source in (mounts or {}).items()},
                }
            )
            enter = 'while [ "$1" != -- ]; do echo $$ > "$1"; shift; done; shift; exec "$@"'
            self._process = subprocess.Popen(
                [
                    *("sh", "-c", enter, "sh", *(str(g / "cgroup.procs") for g in self.cgroups), "--"),
                    *(
                        "unshare",
                        "--pid",
                        "--mount",
                        "--ipc",
                        "--uts",
                        "--net",
                        "--cgroup",
                        "--fork",
                        "--kill-child",
                        "--mount-proc",
                    ),
                    *(sys.executable, "-I", str(HERE / "bare_init.py"), task),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for whoever has to clean up.
                start_new_session=True,
            )
            self.expect("init")
        except BaseException:
            self.close()
            raise

    @property
    def control(self) -> Path:
        """The control volume as the agent sees it."""
        return self.base / CONTROL_VOLUME

    @property
    def container(self) -> Container:
        """As the agent finds it; pinned once."""
        if self._pinned is None:
            self._pinned = find(self.uid, self.control)
            assert self._pinned is not None, "the container was not found"
        return self._pinned

    def go(self) -> None:
        """Start the command."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def line(self, patience_s: float = PATIENCE_S) -> str:
        """The next line of output. Fails the test if none comes."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + patience_s
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(fd, 65536) if ready else b""
            if not data:
                raise AssertionError(f"no line; so far: {self._buffer!r}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def expect(self, wanted: str) -> None:
        """Read until this line."""
        seen = []
        while True:
            try:
                seen.append(self.line())
            except AssertionError as e:
                raise AssertionError(f"{wanted!r} did not come; output: {seen}; {e}") from None
            if seen[-1] == wanted:
                return

    def ask(self, what: str = "ask") -> dict[str, Any]:
        """Let bare_app answer."""
        (self.control / what).touch()
        line = self.line()
        try:
            return dict(json.loads(line))
        except ValueError:
            raise AssertionError(f"no answer but {line!r}, {self._buffer!r}") from None

    def close(self) -> None:
        """Kill everything and remove what was made."""
        if self._pinned is not None:
            self._pinned.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            # unshare's --kill-child takes PID 1 along, and the kernel the rest of the namespace.
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        _remove_cgroups(self.cgroups)
        shutil.rmtree(self.base, ignore_errors=True)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hierarchies() -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2") and not SKIPPED_CONTROLLERS & set(options.split(",")):
            yield Path(left.split(" ")[4])


def _cgroups(uid: str) -> list[Path]:
    """`/vllmsnapshot-test/pod<uid>/engine` in every hierarchy."""
    return [hierarchy / "vllmsnapshot-test" / f"pod{uid}" / "engine" for hierarchy in dict.fromkeys(_hierarchies())]


def _remove_cgroups(cgroups: Sequence[Path]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    for cgroup in cgroups:
        while True:
            try:
                cgroup.rmdir()
                cgroup.parent.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                # Its processes are dead but not yet gone.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        with contextlib.suppress(OSError):
            cgroup.parent.parent.rmdir()  # shared by all containers: the last one does it


def app(megabytes: int = 20, trouble: str = "", *, python: str = sys.executable) -> list[str]:
    """The command of bare_app."""
    return [python, "-I", str(HERE / "bare_app.py"), "/run/vllmsnapshot", str(megabytes), *([trouble] if trouble else [])]
