"""The local cluster leaves nothing behind, however its life ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster import Cluster, ClusterError, cache, cgroups

NAME = "harness-life"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(NAME, "controlplane")
    cluster.down()
    yield cluster
    cluster.down()


def starting() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.cluster", "up", "--mode", "controlplane", "--name", NAME]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=os.getcwd())


def leftovers() -> list[str]:
    """Processes, cgroups and files of the cluster. Mounts and network end with the last process."""
    found = [str(path) for path in (cache.cache_root() / "run").glob(f"{NAME}*")]
    for hierarchy in cgroups.hierarchies():
        found += [str(path) for path in hierarchy.glob(f"vllmsnapshot-{NAME}*")]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"/run/{NAME}/" in line:
            found.append(line)
    return found


def init_pid() -> int:
    return int(json.loads((cache.cache_root() / "run" / NAME / "box.pid.json").read_text())["pid"])


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running_daemons(cluster: Cluster) -> bool:
    return "kube-apiserver" in cluster.daemons()


def test_killed_while_it_starts(cluster: Cluster) -> None:
    with starting() as process:
        eventually(lambda: running_daemons(cluster))
        process.kill()
    assert leftovers()
    cluster.down()
    assert leftovers() == []


def test_interrupted_while_it_starts(cluster: Cluster) -> None:
    for _ in range(5):
        with starting() as process:
            eventually(lambda: running_daemons(cluster))
            process.send_signal(signal.SIGINT)
        if process.returncode != 0:
            break
        cluster.down()  # on a busy machine it may have come up before the signal was sent
    assert process.returncode == 130
    assert leftovers() == []


def test_up_and_an_unexpected_end(cluster: Cluster) -> None:
    cluster.up()
    first = cluster.pid
    cluster.up()
    assert cluster.pid == first, "a healthy cluster is left as it is"
    os.kill(init_pid(), signal.SIGKILL)
    eventually(lambda: not os.path.exists(f"/proc/{first}"))
    with pytest.raises(ClusterError, match="is not up"):
        cluster.kubectl("version")

    cluster.up()
    assert cluster.pid != first
    assert "default" in cluster.kubectl("get", "namespaces")
    before = os.readlink("/proc/thread-self/ns/net")
    with cluster.enter_network():
        assert os.readlink("/proc/thread-self/ns/net") != before
    assert os.readlink("/proc/thread-self/ns/net") == before

    cluster.down()
    assert leftovers() == []
    cluster.down()


def test_a_daemon_that_ends(cluster: Cluster) -> None:
    cluster.up()
    cluster.stop_daemon("etcd", signal.SIGKILL)
    assert cluster.daemons()["etcd"] == f"exited ({-signal.SIGKILL})"
    assert not cluster.healthy()
    cluster.start_daemon("etcd")
    eventually(cluster.healthy)
