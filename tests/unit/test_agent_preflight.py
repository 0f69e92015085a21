"""What may be captured: the shape of the tree, and how a pod's container is told from others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from vllmsnapshot.agent import containers, namespaces
from vllmsnapshot.agent.capture import MEMORY_MARGIN, check_abstract_sockets, check_memory, find_tree
from vllmsnapshot.agent.containers import Container, Process, descendants, in_pod, read_process
from vllmsnapshot.agent.errors import CaptureError
from vllmsnapshot.api.constants import Reason

INIT = 500


def process(pid: int, parent: int, session: int, **changes: Any) -> Process:
    """The host PID is 500 above the container's."""
    values = {
        "pid": pid + INIT,
        "ppid": parent + INIT,
        "ns_pid": pid,
        "ns_session": session,
        "uid": 0,
        "gid": 0,
        "state": "S",
        "comm": f"p{pid}",
        "start_time": pid,
        "rss_bytes": 1,
        "traced": False,
    }
    return Process(**{**values, **changes})


def test_a_root_with_children() -> None:
    tree = [process(1003, 1000, 1000), process(1000, 0, 1000), process(1004, 1003, 1000)]
    root, processes = find_tree(tree, INIT)
    assert root.ns_pid == 1000
    assert processes[0] == root
    assert {p.ns_pid for p in processes} == {1000, 1003, 1004}


def test_shells_from_outside_and_zombies_do_not_matter() -> None:
    tree = [
        process(1000, 0, 1000),
        process(50, 0, 50, ppid=7),  # kubectl exec: its parent is no process of the container
        process(51, 50, 50),
        process(60, 0, 60, state="Z"),
        process(1001, 1000, 1000, state="Z"),
    ]
    root, processes = find_tree(tree, INIT)
    assert [p.ns_pid for p in processes] == [root.ns_pid] == [1000]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([], "the engine does not run"),
        ([process(1000, 0, 999)], "leads a session"),
        ([process(1000, 0, 1000), process(1005, 0, 1005)], "1005 (p1005) is no descendant of the engine"),
        ([process(1000, 0, 1000), process(1005, 0, 1000)], "1005 (p1005) is no descendant of the engine"),
        ([process(1000, 0, 1000), process(1005, 1000, 1005)], "1005 (p1005) is in session 1005"),
    ],
)
def test_a_tree_that_would_come_back_in_part(tree: list[Process], words: str) -> None:
    with pytest.raises(CaptureError) as error:
        find_tree(tree, INIT)
    assert error.value.reason == Reason.PREFLIGHT_SESSION
    assert words in error.value.message


SOCKETS = """
import socket, sys
bound = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
bound.bind("\\0cuda-uvmfd-4026531836-" + sys.argv[1])
other = socket.socket(socket.AF_UNIX)
print("ready", flush=True)
sys.stdin.read()
"""


def test_an_abstract_socket_of_the_tree_is_named() -> None:
    argv = [sys.executable, "-c", SOCKETS, str(os.getpid())]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with Container(child.pid) as container:
            with pytest.raises(CaptureError) as error:
                check_abstract_sockets(container, [read_process(container.proc, child.pid)])
            # Somebody else's on the same network are no obstacle.
            check_abstract_sockets(container, [read_process(container.proc, os.getpid())])
        child.communicate()
    assert error.value.reason == Reason.PREFLIGHT_ABSTRACT_SOCKET
    assert f"'@cuda-uvmfd-4026531836-{os.getpid()}'" in error.value.message
    assert "serving.hostNetwork: Disabled" in error.value.message


def test_one_open_file_in_two_processes_is_told_from_the_same_file_opened_twice() -> None:
    with open(os.devnull) as one, open(os.devnull) as two:
        with subprocess.Popen(["sleep", "600"], pass_fds=[one.fileno()]) as child:
            me, fd = os.getpid(), one.fileno()
            assert namespaces.same_open_file(me, fd, child.pid, fd)
            assert not namespaces.same_open_file(me, two.fileno(), child.pid, fd)
            assert not namespaces.same_open_file(me, fd, child.pid, 9999)
            child.kill()
        assert not namespaces.same_open_file(me, fd, child.pid, fd)


def test_descendants_of_a_cycle_end() -> None:
    loop = [process(10, 11, 1), process(11, 10, 1)]
    assert descendants(loop, INIT) == []


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("4:memory:/kubepods/burstable/pod0a1b-2c/abc\n0::/\n", True),
        ("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b_2c.slice/cri-containerd-abc.scope\n", True),
        ("0::/kubelet/kubepods/besteffort/pod0a1b-2c/abc", True),
        ("0::/../../pod0a1b-2c/abc", True),
        ("0::/kubepods/pod0a1b-2c1/abc", False),
        ("0::/kubepods/podx0a1b-2c/abc", False),
        ("0::/kubepods/burstable/pod9/cri-0a1b-2c", False),
        ("0::/kubepods-burstable-pod0a1b_2c1.slice/x", False),
        ("", False),
    ],
)
def test_cgroups_name_the_pod(text: str, inside: bool) -> None:
    assert in_pod(text, "0a1b-2c") is inside


def test_a_process_may_call_itself_anything(tmp_path: Path) -> None:
    directory = tmp_path / "7"
    directory.mkdir()
    numbers = " ".join(str(n) for n in range(3, 60))
    (directory / "stat").write_bytes(b"7 (a) S 1 1\n\x1b\xff) T 5 " + numbers.encode())
    (directory / "status").write_text(
        "Name:\ta) S 1 1\\n\nUid:\t10\t0\t0\t0\nGid:\t20\t0\t0\t0\nNSpid:\t7\t2\nNSsid:\t7\t1\nVmSwap:\t4 kB\nRssAnon:\t8 kB\n"
    )
    found = read_process(tmp_path, 7)
    assert (found.state, found.ppid, found.comm) == ("T", 5, "a) S 1 1??\ufffd")
    assert (found.ns_pid, found.ns_session, found.uid, found.rss_bytes) == (2, 1, 10, 12 << 10)
    assert found.start_time == 20
    (directory / "status").write_text("Name:\tx\n")
    with pytest.raises(ValueError, match="ended"):
        read_process(tmp_path, 7)


def test_a_process_that_is_about_to_stop_is_resumed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # CRIU leaves by SIGSTOP. A process that has not got to it yet reads R or S; without a SIGCONT it would stop for ever.
    told: list[tuple[int, int]] = []

    def send(process: Process, number: int, *, proc: Path) -> bool:
        told.append((process.pid, number))
        return True

    class Tree:
        proc = Path("/proc")

        def descendants(self) -> list[Process]:
            states = {10: "T", 11: "R", 12: "S", 13: "t"}
            return [process(pid, 0, 10, state=state) for pid, state in states.items()]

    monkeypatch.setattr(containers, "send", send)
    assert containers.resume_all(cast(containers.Container, Tree())) == 2
    assert told == [(pid + INIT, signal.SIGCONT) for pid in (10, 11, 12, 13)]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("on_device", "limit", "fits"),
    [
        (0, 1, True),  # on CPU everything is in memory already
        (8 * GIB, None, True),
        (8 * GIB, 10 * GIB + MEMORY_MARGIN, True),
        (8 * GIB, 10 * GIB + MEMORY_MARGIN - 1, False),
    ],
)
def test_what_is_on_the_gpu_must_fit_into_the_containers_memory(on_device: int, limit: int | None, fits: bool) -> None:
    """Or the kernel ends an engine that plain vLLM would have left alone."""
    if fits:
        check_memory(2 * GIB, on_device, limit)
        return
    with pytest.raises(CaptureError, match="memory limit is") as e:
        check_memory(2 * GIB, on_device, limit)
    assert e.value.reason == Reason.INSUFFICIENT_MEMORY
