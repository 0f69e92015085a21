"""An engine that fails at each step, in each way: it ends up serving right answers, or the container has ended and says why.

Real processes under the real PID 1. What the kernel and the kubelet add is in tests/node/test_crashes.py and test_port_taken.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.snapshot import TOKENS, answer
from tests.system import PROMPT
from tests.unit.child_harness import Container, alive, container, tree_at_the_barrier, until
from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import EXIT_CODES, Reason

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"), reason="a PID namespace needs root"
)
CRASH = 17
BEFORE = ("start", "canary", "release", "rehearsal", "prebuild", "park", "trim")
AFTER = ("renew", "reload", "answer", "serve")
REASONS = {
    "start": Reason.ENGINE_FAILED,
    "canary": Reason.CANARY_FAILED,
    "release": Reason.RELOAD_FAILED,
    "rehearsal": Reason.RELOAD_FAILED,
    "prebuild": Reason.ENGINE_FAILED,
    "park": Reason.RELOAD_FAILED,
    "trim": Reason.RELOAD_FAILED,
    "renew": Reason.ENGINE_FAILED,
    "reload": Reason.RELOAD_FAILED,
    "answer": Reason.CANARY_FAILED,
    "serve": Reason.ENGINE_FAILED,
}
"""What an exception in each step is called."""
ONLY_AT_THE_BARRIER = ("release", "rehearsal", "park", "trim")
"""Steps that plain vLLM has not: a failure there costs the snapshot, not the replica."""


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Container]:
    with container(tmp_path) as it:
        yield it


def cold(pod: Container, phase: str, how: str) -> None:
    """An attended cold start; released, if the fault comes after that."""
    pod.start("--fault", f"{phase}={how}")
    pod.put(protocol.START, mode="cold", reason="NoContent", attended=True)
    if phase in AFTER:
        pod.file(protocol.READY)
        pod.put(protocol.RELEASE, release=True, host="127.0.0.1", port=pod.port)


def restored(pod: Container, *args: str, timeout_s: float = 300.0) -> str:
    """A tree from another pod, released; the incarnation of this attempt. It is there before its time begins to run."""
    pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="300")
    first = str(pod.hello()["incarnation"])
    pid = tree_at_the_barrier(pod, *args)
    pod.put(protocol.RESTORED, pid=pid, content="c1")
    pod.put(protocol.START, mode="restore", reason="Usable", content="c1", timeout_s=timeout_s)
    pod.put(protocol.RELEASE, release=True, host="127.0.0.1", port=pod.port)
    return first


def serves_right(pod: Container) -> None:
    pod.file(protocol.SERVING)
    reply = json.loads(pod.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": TOKENS}))
    assert reply["choices"][0]["text"] == answer()


def closed(pod: Container) -> bool:
    try:
        socket.create_connection(("127.0.0.1", pod.port)).close()
    except ConnectionRefusedError:
        return True
    return False


def ended(pod: Container, code: int) -> None:
    """The container is over: the kubelet restarts it, and until then the pod is not Ready."""
    assert pod.exit_code() == code, pod.log()
    assert pod.get(protocol.SERVING) is None
    assert closed(pod)


# --- cold starts ---


@pytest.mark.parametrize("phase", BEFORE + AFTER)
def test_an_exception_in_a_cold_start(pod: Container, phase: str) -> None:
    cold(pod, phase, "raise")
    if phase in ONLY_AT_THE_BARRIER:
        serves_right(pod)
        assert pod.get(protocol.READY) is None, "it was not captured"
    else:
        ended(pod, EXIT_CODES[REASONS[phase]])
    failed = pod.get(protocol.FAILED)
    assert failed is not None
    assert failed["reason"] == REASONS[phase]
    assert f"ordered to fail in {phase}" in failed["message"]


@pytest.mark.parametrize(("how", "code"), [("exit", CRASH), ("finish", 0)])
@pytest.mark.parametrize("phase", ["start", "trim", "reload", "serve"])
def test_an_engine_that_exits_in_a_cold_start(pod: Container, phase: str, how: str, code: int) -> None:
    cold(pod, phase, how)
    ended(pod, code)


@pytest.mark.parametrize("phase", ["start", "rehearsal", "trim", "reload", "serve"])
def test_an_engine_that_hangs_in_a_cold_start_is_never_ready_and_can_be_ended(pod: Container, phase: str) -> None:
    """The startup probe of the pod ends it, where nobody is quicker; it can tell a slow start from a hang no better."""
    cold(pod, phase, "hang")
    until(lambda: f"hangs in {phase}" in pod.log(), "the hang")
    assert pod.get(protocol.SERVING) is None
    tree = pod.processes()
    pod.signal(signal.SIGTERM)
    ended(pod, 128 + signal.SIGTERM)
    assert not [pid for pid in tree if alive(pid)]


# --- restored trees ---


@pytest.mark.parametrize("how", ["raise", "finish", "hang"])
@pytest.mark.parametrize("phase", AFTER)
def test_a_restored_engine_that_fails_gives_way_to_a_cold_start(pod: Container, phase: str, how: str) -> None:
    first = restored(pod, "--fault", f"{phase}={how}", timeout_s=1.0 if how == "hang" else 300.0)
    before = pod.processes()
    said = pod.hello(known=first)["failed_restores"]["c1"]
    assert said.startswith({"raise": REASONS[phase], "finish": "exit code 0", "hang": "NotServing"}[how]), said
    assert not [pid for pid in before if alive(pid)], "nothing of the attempt is left"
    pod.put(protocol.START, mode="cold", reason="RestoreDied", attended=False)
    serves_right(pod)


def test_a_restored_engine_whose_port_is_taken_says_so(pod: Container) -> None:
    with socket.create_server(("127.0.0.1", pod.port)):
        first = restored(pod)
        assert pod.hello(known=first)["failed_restores"]["c1"].startswith(Reason.BIND_FAILED)
        pod.put(protocol.START, mode="cold", reason="RestoreDied", attended=False)
        assert pod.exit_code() == EXIT_CODES[Reason.BIND_FAILED]
        assert pod.get(protocol.SERVING) is None


# --- part of the tree ---


@pytest.mark.parametrize("moment", ["at the barrier", "serving"])
def test_when_the_second_process_is_killed_the_first_does_not_go_on_alone(pod: Container, moment: str) -> None:
    """As the kernel does for want of memory: it takes the largest process, not the one that others wait for."""
    pod.start()
    pod.put(protocol.START, mode="cold", reason="NoContent", attended=True)
    pod.file(protocol.READY)
    if moment == "serving":
        pod.put(protocol.RELEASE, release=True, host="127.0.0.1", port=pod.port)
        serves_right(pod)
    _, helper = sorted(pod.processes())
    os.kill(helper, signal.SIGKILL)
    if moment != "serving":
        pod.put(protocol.RELEASE, release=True, host="127.0.0.1", port=pod.port)
    assert pod.exit_code() != 0, pod.log()
    assert closed(pod)
    failed = pod.get(protocol.FAILED)
    assert failed is not None
    assert failed["reason"] == Reason.ENGINE_FAILED
