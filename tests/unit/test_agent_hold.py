"""Two agents on one node (a pod that was forgotten while its process still ends): only one acts, the other waits and touches nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

LIMIT_S = 180.0
"""Only so that a hang fails instead of hanging; nothing is measured."""
PAUSE_S = 0.05


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Process:
    """The agent's own program on a node made of directories. Its API server does not answer, which is nobody's concern here."""

    def __init__(self, root: Path, name: str) -> None:
        self.port = free_port()
        self.log = root / f"{name}.log"
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NODE_NAME": "node-1",
            "VLLMSNAPSHOT_KUBELET_DIR": str(root / "kubelet"),
            "VLLMSNAPSHOT_STORE_DIR": str(root / "store"),
            "VLLMSNAPSHOT_CRIU_PREFIX": str(root / "no-criu"),
            "VLLMSNAPSHOT_ACCELERATOR": "cpu",
            "VLLMSNAPSHOT_SECCOMP_PROFILE": "none",
            "VLLMSNAPSHOT_HEALTH_HOST": "127.0.0.1",
            "VLLMSNAPSHOT_HEALTH_PORT": str(self.port),
            "VLLMSNAPSHOT_KUBECONFIG": str(root / "kubeconfig"),
        }
        command = [sys.executable, "-c", "from vllmsnapshot.agent.app import main; main()"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=root)

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of the health endpoint; (0, "") while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()
        except OSError:
            return 0, ""

    def until_says(self, path: str, *parts: str) -> None:
        """Until the health endpoint says all of this."""
        until = time.monotonic() + LIMIT_S
        while not all(part in self.ask(path)[1] for part in parts):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(PAUSE_S)

    def end(self, number: int) -> int:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "kubelet/pods").mkdir(parents=True)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "x", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    return tmp_path


@contextlib.contextmanager
def started(root: Path, name: str) -> Iterator[Process]:
    made = Process(root, name)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.process.kill()
        made.process.wait()


def test_the_second_agent_waits_without_touching_anything_and_takes_over_from_one_that_was_killed(node: Path) -> None:
    with started(node, "first") as first:
        # Its endpoint is up once the node is its own, and the leftovers of an agent before it are gone.
        first.until_says("/readyz", "not ready")
        being_written = node / "store/tmp/content-1234"
        being_written.mkdir()
        (being_written / "pages").write_text("half")
        with started(node, "second") as second:
            second.until_says("/readyz", "another agent", f"process {first.process.pid}")
            assert second.ask("/readyz")[0] == 503
            assert second.ask("/healthz") == (200, "ok\n"), "the kubelet must not restart it for its patience"
            assert second.ask("/metrics")[0] == 404
            assert (being_written / "pages").read_text() == "half"
            assert f"process {first.process.pid}" in second.log.read_text()

            assert first.end(signal.SIGKILL) == -signal.SIGKILL
            second.until_says("/readyz", "not ready")
            assert not being_written.exists(), "now it is a leftover"
            assert second.ask("/metrics")[0] == 200


def test_one_that_waits_ends_when_it_is_told_and_leaves_the_other_alone(node: Path) -> None:
    with started(node, "first") as first:
        first.until_says("/readyz", "not ready")
        with started(node, "second") as second:
            second.until_says("/readyz", "another agent")
            assert second.end(signal.SIGTERM) == 0
        assert first.ask("/healthz") == (200, "ok\n")
        assert first.end(signal.SIGTERM) == 0
