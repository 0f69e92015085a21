"""A round of every fault at once on two snapshots that are asked all the time: nothing wrong, nothing lost, nothing left behind.

The long run of the same is `make chaos`. This one has a cluster of its own: it audits the whole node.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.audit import Audit, settled
from tests.chaos.faults import PORT_RANGES
from tests.chaos.run import Run, own_disk
from tests.chaos.schedule import one_round
from tests.cluster import Cluster
from tests.nodeview import NodeView
from tests.system import System, suite_cluster

SEED = 6
PACE = 1.5
"""A round of the long run takes 95 seconds; here everybody waits for it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """In the place of the suite's."""
    with suite_cluster("chaos-tests", ["engine"], prepared=own_disk) as made:
        yield made


async def test_a_round_of_every_fault(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(SEED, one_round(SEED, PACE), print)
    with cluster.enter_network():
        await run.play(cluster, tmp_path / "chaos.log")
    print(json.dumps(run.summary(), indent=2))
    assert run.faults == []  # `run.unexplained` is for who looks: it depends on how late the test learned of things
    assert run.done.total() > len(run.actions) / 2, "most of it was missed: this proves little"


async def test_the_audit_finds_what_is_left(cluster: Cluster, system: System, node: NodeView) -> None:
    audit = Audit(system, node, [])
    checks = (audit.processes, audit.mounts_left, audit.network_namespaces, audit.artifacts, audit.temporary_files, audit.ports)
    assert [found for check in checks for found in await settled(check)] == []
    port = PORT_RANGES[0][1]
    with contextlib.ExitStack() as stack:
        for directory in ("tmp", "artifacts"):
            path = node.store / directory / "planted"
            path.mkdir()
            stack.callback(shutil.rmtree, path, ignore_errors=True)
        # At once: the agent removes both, within a minute.
        assert await audit.temporary_files() == ["tmp/planted in the store"]
        assert await audit.artifacts() == ["planted is on the disk and not in the API"]
        where = str(cluster.node_root / "volume-plugins")
        cluster.exec(["mount", "-t", "tmpfs", "planted", where])
        stack.callback(cluster.exec, ["umount", where])
        cluster.exec(["ip", "netns", "add", "planted"])
        stack.callback(cluster.exec, ["ip", "netns", "delete", "planted"])
        # Its parent ends, and so it becomes one of the node's own.
        cluster.exec(["sh", "-c", f"setsid python3 -m http.server {port} >/dev/null 2>&1 &"])

        async def started() -> bool:
            return bool(node.running("http.server")) and bool(await audit.ports())

        await system.until("a process that nobody wants", started, 60)
        for process in node.running("http.server"):
            stack.callback(os.kill, process.pid, signal.SIGKILL)

        assert any("http.server" in found for found in await audit.processes())
        assert await audit.ports() == [f"a process listens on port {port}, which no pod has"]
        assert f"{where} (1 more than before)" in await audit.mounts_left()
        assert len(await audit.network_namespaces()) == 1
