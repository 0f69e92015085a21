"""The end of an engine whose state on a GPU the driver has put back: the real init and server, the agent's half on the fake driver.

No request is cut, the GPU is let go before anything is killed, the exit code is that of any other end, and without an agent, or
with one that fails, the end is the one that it would have been.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import build_libcuda
from tests.unit.child_harness import Container as Pod
from tests.unit.child_harness import alive, container, until
from vllmsnapshot.agent import cuda, driver
from vllmsnapshot.agent.containers import Container
from vllmsnapshot.agent.errors import AgentError
from vllmsnapshot.agent.local import LocalOps
from vllmsnapshot.agent.nodeops import PodRef
from vllmsnapshot_child import protocol

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"), reason="a PID namespace needs root"
)
REF = PodRef(namespace="default", name="b", uid="uid-b")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libcuda(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with container(tmp_path) as it:
        yield it


class Ops(LocalOps):
    """The node operations for this one container."""

    def __init__(self, pod: Pod, accelerator: cuda.Cuda) -> None:
        self._pod = pod
        self._accelerator = accelerator

    @contextlib.contextmanager
    def _container(self, *_: object) -> Iterator[Container]:
        with Container(self._pod.pid) as it:
            yield it


class Agent:
    """What of the agent ends a tree; every process of the tree has a context on the fake GPU."""

    def __init__(self, directory: Path, library: Path, pod: Pod) -> None:
        self.directory = directory
        self.pod = pod
        env = {**os.environ, driver.LIBCUDA: str(library), driver.LIBNVML: str(library), "VLLMSNAPSHOT_FAKE_GPU": str(directory)}
        self.cuda = cuda.Cuda(proc=directory / "proc", env=env)
        self.tree = list(pod.processes())
        (directory / "state").mkdir(parents=True)
        for pid in self.tree:
            (directory / "proc" / str(pid) / "fd").mkdir(parents=True)
            os.symlink("/dev/nvidia0", directory / "proc" / str(pid) / "fd" / "9")
            (directory / "state" / str(pid)).write_text(str(cuda.RUNNING))

    def states(self) -> set[int]:
        return {int((self.directory / "state" / str(pid)).read_text()) for pid in self.tree}

    def calls(self) -> list[str]:
        file = self.directory / "calls"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def retire(self) -> None:
        """As soon as the server waits for it."""
        ending = self.pod.file(protocol.ENDING)
        assert all(alive(pid) for pid in self.tree)
        with contextlib.closing(self.cuda):
            Ops(self.pod, self.cuda).retire(REF, ending["timeout_s"], lambda: None)


def restored(pod: Pod, *args: str, attend_end: bool = True, serving: bool = True, **env: str) -> None:
    """A tree that came from another pod, and serves."""
    pod.start(**env)
    pod.put(protocol.START, mode="restore", reason="Usable", content="c1")
    elsewhere = pod.control.parent / "elsewhere"
    elsewhere.mkdir()
    ready = elsewhere / protocol.READY
    argv = [sys.executable, "-m", "vllmsnapshot_child.server", "--ready-file", str(ready)]
    pid = pod.inside(*argv, "--release-file", str(pod.control / protocol.RELEASE), "--", *args, env=env)
    until(ready.exists, "the tree at the barrier")
    pod.put(protocol.RESTORED, pid=pid, content="c1")
    pod.put(protocol.RELEASE, release=True, host="127.0.0.1", port=pod.port, attend_end=attend_end)
    if serving:
        pod.file(protocol.SERVING)


def test_requests_are_answered_then_the_gpu_is_let_go_then_the_tree_is_killed(pod: Pod, tmp_path: Path, library: Path) -> None:
    restored(pod)
    agent = Agent(tmp_path / "gpu", library, pod)
    assert len(agent.tree) == 2
    go, answers = tmp_path / "go", []

    def ask() -> None:
        answers.append(json.loads(pod.ask("/v1/completions", {"prompt": "x", "max_tokens": 2, "until": str(go)})))

    client = threading.Thread(target=ask)
    client.start()
    until(lambda: b"small_answering 1\n" in pod.ask("/metrics"), "the request is being answered")
    pod.signal(signal.SIGTERM)
    until(lambda: refused(pod), "no new connection is taken")
    assert pod.get(protocol.ENDING) is None
    go.touch()
    agent.retire()
    client.join()
    assert answers[0]["choices"][0]["text"]
    assert agent.states() == {cuda.CHECKPOINTED}
    assert agent.calls() == ["Lock", "Checkpoint"] * 2
    assert pod.exit_code() == 0
    assert "ended as it had announced (exit code 137)" in pod.log()
    assert "before the end" not in pod.log()
    assert not [pid for pid in agent.tree if alive(pid)]


def refused(pod: Pod) -> bool:
    try:
        pod.ask("/health")
    except OSError:
        return True
    return False


def test_an_agent_that_fails_changes_nothing(pod: Pod, tmp_path: Path, library: Path) -> None:
    restored(pod, VLLMSNAPSHOT_TERM_GRACE_S="4")
    agent = Agent(tmp_path / "gpu", library, pod)
    (agent.directory / "control").write_text("Lock 0 error 999\n")
    pod.signal(signal.SIGTERM)
    with pytest.raises(AgentError):
        agent.retire()
    assert all(alive(pid) for pid in agent.tree), "what could not be let go is not killed"
    assert pod.exit_code() == 0
    assert "nobody has ended us" in pod.log()
    assert "killed" not in pod.log()


def test_without_an_agent_the_end_is_the_plain_one(pod: Pod) -> None:
    restored(pod, VLLMSNAPSHOT_TERM_GRACE_S="3")
    pod.signal(signal.SIGTERM)
    assert pod.exit_code() == 0
    assert "nobody has ended us" in pod.log()
    assert "before the end" not in pod.log()


def test_the_grace_time_is_the_limit_of_it_all(pod: Pod) -> None:
    restored(pod, VLLMSNAPSHOT_TERM_GRACE_S="4")
    pod.signal(signal.SIGTERM)
    pod.file(protocol.ENDING)
    for pid in pod.processes():
        os.kill(pid, signal.SIGSTOP)
    assert pod.exit_code() == 0, "killed by init after the grace time, with the code that was announced"
    assert "did not end in time: killed" in pod.log()


def test_a_grace_time_without_room_is_not_waited_in(pod: Pod) -> None:
    restored(pod, VLLMSNAPSHOT_TERM_GRACE_S="0.9")
    pod.signal(signal.SIGTERM)
    assert pod.exit_code() == 0
    assert pod.get(protocol.ENDING) is None


def test_an_engine_that_is_not_attended_ends_at_once(pod: Pod) -> None:
    restored(pod, attend_end=False)
    pod.signal(signal.SIGTERM)
    assert pod.exit_code() == 0
    assert pod.get(protocol.ENDING) is None


def test_a_tree_that_is_told_to_end_before_it_serves(pod: Pod, tmp_path: Path, library: Path) -> None:
    restored(pod, "--fault", "reload=hang", serving=False)
    until(lambda: "hangs in reload" in pod.log(), "the reload")
    agent = Agent(tmp_path / "gpu", library, pod)
    pod.signal(signal.SIGTERM)
    agent.retire()
    assert agent.states() == {cuda.CHECKPOINTED}
    assert pod.exit_code() == 128 + signal.SIGTERM


def test_another_life_of_the_container_is_left_alone(pod: Pod, tmp_path: Path, library: Path) -> None:
    restored(pod)
    agent = Agent(tmp_path / "gpu", library, pod)

    def gone() -> None:
        raise AgentError("RestoreDied", "another one")

    with pytest.raises(AgentError):
        Ops(pod, agent.cuda).retire(REF, 5.0, gone)
    assert agent.states() == {cuda.RUNNING}
    assert all(alive(pid) for pid in agent.tree)
