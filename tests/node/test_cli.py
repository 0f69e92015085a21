"""`kubectl vsnap` on the real cluster: its answers come from real agents, stores and CRIU."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from tests.cluster import Cluster
from tests.node.engine.small import pattern
from tests.node.snapshot import MIB, Make, answer, names, report
from tests.nodeview import NodeView, flip
from vllmsnapshot.api import constants as c
from vllmsnapshot.cli.errors import Exit


async def vsnap(cluster: Cluster, *args: str) -> tuple[int | None, str, str]:
    """Exit status, stdout, stderr of the program."""
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    command = [sys.executable, "-m", "vllmsnapshot.cli.app", *args]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(180):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    return process.returncode, out.decode(), err.decode()


async def test_recapture_then_verify_then_find_the_damage(make: Make, cluster: Cluster, node: NodeView) -> None:
    snap = await make("cli")
    seed, before = await snap.seeded()
    status, _, err = await vsnap(cluster, "recapture", "cli", "-n", snap.namespace)
    assert status == Exit.OK, err
    assert "Done: taken again on 1 node" in err

    async def replaced() -> str | None:
        found = [o["metadata"]["name"] for o in await snap.contents()]
        return found[0] if len(found) == 1 and found[0] != before else None

    after = await snap.system.until("the new artifact alone", replaced, 60)
    assert names(await snap.ready(1)) == names([seed]), "the replica that served serves on"
    assert node.artifact(before) is None, "the old files are gone"

    status, out, err = await vsnap(cluster, "artifacts", "verify", "cli", "-n", snap.namespace)
    assert status == Exit.OK, err
    assert f"{after} on node" in out
    assert "Intact" in out

    snap.scale(2)
    restored = (await snap.ready(2))[1]
    assert (report(restored).start, report(restored).content) == (c.START_RESTORE, after)
    assert await snap.ask(restored) == answer()
    status, out, _ = await vsnap(cluster, "describe", "cli", "-n", snap.namespace)
    assert status == Exit.OK
    assert f"from {after}" in out
    assert "criu" in out

    # Behind the back of the size and the times: only the digest tells.
    flip(node.pages(after), pattern(2, 2 * MIB)[MIB : MIB + 64], keep_time=True)
    status, out, _ = await vsnap(cluster, "artifacts", "verify", after, "-o", "json")
    assert status == Exit.PROBLEM
    [found] = json.loads(out)
    assert (found["outcome"], "pages" in found["message"]) == ("Corrupt", True)

    async def quarantined() -> bool:
        return c.QUARANTINED in snap.seen.content_conditions(after)

    await snap.system.until("the quarantine", quarantined, 30)
    snap.never_wrong(answer())


async def test_doctor_finds_a_sound_cluster(make: Make, cluster: Cluster) -> None:
    snap = await make("doctor")
    await snap.seeded()
    _, out, _ = await vsnap(cluster, "doctor", "-o", "json")
    found = json.loads(out)
    sound = [item for item in found if not item["area"].startswith("snapshot ")]  # others' snapshots are not its business
    assert [item for item in sound if item["level"] == "Fail"] == []
    assert {"operator", "agents", "rights of the operator", "rights of the agent", "your rights"} <= {x["name"] for x in sound}
    assert any(item["area"].startswith("node ") for item in sound)
