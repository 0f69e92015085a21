"""PID 1 in a PID namespace of its own, as a container would have it, with the small engine. Needs root, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllmsnapshot_child import protocol

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(ROOT / "child"), str(ROOT / "tests/node/engine"), str(ROOT / "tests/unit")])
T = TypeVar("T")
LIMIT_S = 30.0
"""A wait ends when its condition holds; this only ends a test that hangs."""


def free_port() -> int:
    """A port nobody listens on (it may be taken before it is used; nothing better exists)."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def until(condition: Callable[[], T | None], what: str, limit_s: float = LIMIT_S) -> T:
    """The condition's value, once it is true."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never: {what}")
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def entry_point() -> list[str]:
    """How the image starts PID 1."""
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (ROOT / "Dockerfile.child").read_text(), re.M)
    argv: list[str] = json.loads(found)
    return argv


def in_a_namespace(*argv: str) -> list[str]:
    """A command line that runs this as PID 1 of a PID namespace, ends as it ends, and takes all of it along when it is killed."""
    return ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *argv]


def first_in(launcher: int) -> int:
    """PID, as seen here, of what `in_a_namespace` has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return int(until(lambda: children.read_text().split() if children.exists() else ["0"], "PID 1")[0])


class Container:
    """One container: control and scratch volume, and init as PID 1."""

    def __init__(self, directory: Path) -> None:
        self.control = directory / "control"
        self.scratch = directory / "scratch"
        self.log_path = directory / "log"
        self.python = directory / "bin/python3"
        for path in (self.control, self.scratch, self.python.parent):
            path.mkdir(exist_ok=True)
        self.interpreter()
        self.port = free_port()
        self.launcher: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def interpreter(self, before: str = "") -> None:
        """Make the image's `python3` this interpreter, with commands of a shell `before` it."""
        self.python.write_text(f'#!/bin/sh\n{before}\nexec {sys.executable} "$@"\n')
        self.python.chmod(0o755)

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": PATH,
            "TMPDIR": str(self.scratch),
            "HOSTNAME": "pod-a",
            "VLLMSNAPSHOT_ENGINE": "small:create",
            "SMALL_SHM": str(self.scratch),
            "VLLMSNAPSHOT_CONTROL_DIR": str(self.control),
            "VLLMSNAPSHOT_SCRATCH_DIRS": str(self.scratch),
            "VLLMSNAPSHOT_PORT": str(self.port),
            "VLLMSNAPSHOT_HOST": "127.0.0.1",
            "VLLMSNAPSHOT_NOTICE_S": "0",
            **extra,
        }

    def start(self, *args: str, **env: str) -> None:
        """Start PID 1 with these arguments."""
        argv = in_a_namespace(*entry_point(), "--", *args)
        with self.log_path.open("ab") as log:
            self.launcher = subprocess.Popen(argv, env=self.environment(env), stdout=log, stderr=log)
        self.pid = first_in(self.launcher.pid)

    def inside(self, *argv: str, session: bool = True, env: Mapping[str, str] | None = None) -> int:
        """Start a process in the container that PID 1 inherits, as it does a restored tree; its PID there."""
        script = f'{"setsid " if session else ""}"$@" </dev/null >&2 & echo $!'
        enter = ["nsenter", f"--target={self.pid}", "--pid", "--mount", "sh", "-c", script, "sh", *argv]
        with self.log_path.open("ab") as log:
            out = subprocess.run(enter, env=self.environment(env or {}), stdout=subprocess.PIPE, stderr=log, check=True)
        return int(out.stdout)

    def processes(self) -> dict[int, str]:
        """State by PID (seen from outside) of everything in the container but PID 1."""
        found = {}
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if int(name) != self.pid and os.readlink(f"/proc/{name}/ns/pid") == space:
                    stat = Path(f"/proc/{name}/stat").read_text()
                    found[int(name)] = stat[stat.rindex(")") + 2]
        return found

    def hello(self, known: str = "") -> dict[str, Any]:
        """The hello of an incarnation other than `known`."""

        def look() -> dict[str, Any] | None:
            value = self.get(protocol.HELLO)
            assert value is not None or self.running(), f"PID 1 is gone:\n{self.log()}"
            return value if value and value["incarnation"] != known else None

        return until(look, "hello.json")

    def get(self, name: str) -> dict[str, Any] | None:
        try:
            value: dict[str, Any] = json.loads((self.control / name).read_text())
        except FileNotFoundError:
            return None
        return value

    def file(self, name: str) -> dict[str, Any]:
        """A control file, once it is there."""

        def look() -> dict[str, Any] | None:
            value = self.get(name)
            assert value is not None or self.running(), f"PID 1 is gone:\n{self.log()}"
            return value

        return until(look, name)

    def put(self, name: str, **value: Any) -> None:
        """Write a control file of the present incarnation, as the agent does."""
        with protocol.open_dir(str(self.control)) as fd:
            protocol.write(fd, name, {"incarnation": self.hello()["incarnation"], **value})

    def running(self) -> bool:
        return self.launcher is not None and self.launcher.poll() is None

    def signal(self, number: int) -> None:
        """To PID 1, as the runtime does."""
        os.kill(self.pid, number)

    def exit_code(self) -> int:
        """PID 1's exit code (unshare hands it on)."""
        assert self.launcher is not None
        return self.launcher.wait(LIMIT_S)

    def log(self) -> str:
        return self.log_path.read_text()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=LIMIT_S) as reply:
            answer: bytes = reply.read()
            return answer

    def crash(self) -> None:
        """Make the server end in the middle of a request."""
        with contextlib.suppress(OSError):
            self.ask("/crash", {})

    def close(self) -> None:
        if self.launcher is not None and self.running():
            os.kill(self.pid or self.launcher.pid, signal.SIGKILL)
            self.launcher.wait(LIMIT_S)


@contextlib.contextmanager
def container(directory: Path) -> Iterator[Container]:
    """A container that is gone in the end."""
    it = Container(directory)
    try:
        yield it
    finally:
        it.close()


def tree_at_the_barrier(pod: Container, *args: str, **env: str) -> int:
    """A server tree that appears in the container as a restored one does: at the barrier, waiting for release.json there."""
    elsewhere = pod.control.parent / "elsewhere"  # its ready.json was written in another pod
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / protocol.READY).unlink(missing_ok=True)
    files = ("--ready-file", str(elsewhere / protocol.READY), "--release-file", str(pod.control / protocol.RELEASE))
    pid = pod.inside(sys.executable, "-m", "vllmsnapshot_child.server", *files, "--", *args, env=env)
    until((elsewhere / protocol.READY).exists, "the tree at the barrier")
    return pid
