"""Capture, restore, serve: what a user sees when nothing goes wrong."""

from __future__ import annotations

import re

from tests.node.snapshot import Make, answer, names, report, restarts, starts
from tests.scrape import samples, total
from tests.system import System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import CONTENTS, PODS, Resource

SERVICES = Resource("", "v1", "services", "Service")


async def test_one_cold_three_restored_at_once(make: Make) -> None:
    snap = await make("three", restore={"maxConcurrentPerNode": 3})
    seed, content = await snap.seeded()
    assert report(seed).reason == c.Reason.NO_ARTIFACT
    snap.scale(4)
    pods = await snap.ready(4)

    assert starts(pods) == [c.START_COLD, *[c.START_RESTORE] * 3]
    assert {report(pod).content for pod in pods[1:]} == {content}
    assert [restarts(pod) for pod in pods] == [0, 0, 0, 0]
    assert all(condition(pod, c.CONDITION_VERIFIED, "reason") == c.Reason.VERIFIED for pod in pods)
    replies = [await snap.respond(pod) for pod in pods]
    assert [reply and reply["choices"][0]["text"] for reply in replies] == [answer()] * 4
    # Four engines in four pods, each of which knows where it is: not one that answers for all.
    assert {reply["hostname"] for reply in replies if reply} == names(pods)
    assert len({pod["status"]["podIP"] for pod in pods}) == 4
    snap.never_wrong(answer())
    assert len(await snap.contents()) == 1


async def test_the_log_goes_on_after_a_restore(make: Make) -> None:
    snap = await make("logs", args=["--cold-start-s=1.5"])
    seed, _ = await snap.seeded()
    snap.scale(2)
    _, restored = await snap.ready(2)

    async def ticked() -> list[int] | None:
        return snap.ticks(restored) or None  # a line a second: the next one may not be there yet

    first = await snap.system.until("a line of the restored engine", ticked, 30)
    assert first, snap.log(restored)
    assert first[0] > 0, "a restored engine counts on from where it was captured"

    async def more() -> bool:
        return snap.ticks(restored)[-1] > first[-1]

    await snap.system.until("new lines in the log of the restored pod", more, 10)
    for pod in (seed, restored):
        ticks = snap.ticks(pod)
        assert ticks == list(range(ticks[0], ticks[-1] + 1)), "lines were lost or doubled"
    assert snap.ticks(seed)[0] == 0


async def test_host_network_replicas_share_a_node_and_a_service(make: Make, system: System) -> None:
    snap = await make("host", serving={"hostNetwork": "Enabled", "portRange": {"start": 21000, "end": 21009}})
    await snap.seeded()
    snap.scale(3)
    pods = await snap.ready(3)

    ports = [int(pod["metadata"]["annotations"][c.ANNOTATION_PORT]) for pod in pods]
    assert len(set(ports)) == 3
    assert all(21000 <= port <= 21009 for port in ports)
    assert len({pod["status"]["podIP"] for pod in pods}) == 1
    assert starts(pods) == [c.START_COLD, c.START_RESTORE, c.START_RESTORE]
    replies = [await snap.respond(pod) for pod in pods]
    assert [reply and (reply["port"], reply["choices"][0]["text"]) for reply in replies] == [(port, answer()) for port in ports]

    service = await system.kube.get(SERVICES, snap.name, snap.namespace)
    assert service is not None
    address, port = service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]
    reached: set[int] = set()

    async def all_reached() -> bool:
        reply = await system.post(address, port, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        if reply is not None:
            reached.add(reply["port"])
        return reached == set(ports)

    await system.until(f"the Service to reach {ports}", all_reached, 30)


async def test_kubectl_tells_a_newcomer_what_happened(make: Make, system: System) -> None:
    snap = await make("told")
    _, content = await snap.seeded()
    snap.scale(2)
    seed, restored = await snap.ready(2)

    async def settled() -> bool:
        found = await snap.get()
        timings = found.get("status", {}).get("timings") or {}
        return condition(found, c.READY) == "True" and "restoredStart" in timings and "freeze" in timings

    await system.until("a status with all timings", settled, 15)
    header, row = system.backend.kubectl("get", "vsnap", snap.name).splitlines()
    columns = dict(zip(re.split(r"\s{2,}", header.strip()), re.split(r"\s{2,}", row.strip()), strict=True))
    assert columns["READY"] == "True"
    assert columns["REPLICAS"] == "2/2"
    assert columns["RESTORED"] == "1"
    assert columns["SNAPSHOT"] == c.Reason.CAPTURED
    assert re.fullmatch(r"\d+\.\d+s", columns["COLD"])
    assert re.fullmatch(r"\d+\.\d+s", columns["RESTORE"])

    told = system.backend.kubectl("describe", "vsnap", snap.name)
    for word in (
        "Cold Start:",
        "Capture:",
        "Freeze:",
        "Restored Start:",
        "Restore:",
        "Release:",
        "Speedup:",
        c.Reason.NO_ARTIFACT,
        content,
    ):
        assert word in told, f"{word} is not in\n{told}"
    events = told[told.index("Events:") :]
    for word in (c.Reason.CAPTURED, c.Reason.RESTORED):
        assert word in events, f"no event {word} in\n{told}"
    of_pod = system.backend.kubectl("describe", "pod", restored["metadata"]["name"])
    assert content in of_pod
    phases = report(restored).phases
    assert {"schedule_s", "restore_s", "release_to_serving_s", "total_s"} <= phases.keys()
    assert {"schedule_s", "engine_s", "release_to_serving_s", "total_s"} <= report(seed).phases.keys()
    of_content = system.backend.kubectl("describe", "vsnapcontent", content)
    assert "Phases:" in of_content
    assert "sha256:" in of_content


async def test_nothing_is_written_at_rest(make: Make, system: System) -> None:
    snap = await make("rest")
    await snap.seeded()
    snap.scale(2)
    await snap.ready(2)

    async def idle() -> bool:
        """Status and events of the last transitions are written."""
        before = await versions()
        await resync(system)
        return before == await versions()

    async def versions() -> dict[str, str]:
        objects = [await snap.get(), *await snap.pods(), *await snap.contents()]
        return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in objects}

    await system.until("the snapshot to come to rest", idle, 60)
    before = await versions()
    events = len(await system.kube.list(CONTENTS)), system.backend.kubectl("get", "events", "-o", "name").count("\n")
    for _ in range(2):
        await resync(system)
    assert await versions() == before
    assert (len(await system.kube.list(CONTENTS)), system.backend.kubectl("get", "events", "-o", "name").count("\n")) == events


async def resync(system: System) -> None:
    """Have the operator look at everything again (an event on an agent's pod does that), and wait until it has."""
    (operator,) = await system.kube.list(PODS, labels=f"{c.LABEL_COMPONENT}={c.COMPONENT_OPERATOR}")
    (agent,) = await system.kube.list(PODS, labels=f"{c.LABEL_COMPONENT}={c.COMPONENT_AGENT}")
    port = operator["spec"]["containers"][0]["ports"][0]["containerPort"]

    async def metrics() -> tuple[float, float]:
        """Passes that were made, and keys that wait for one."""
        async with system.http.get(f"http://{operator['status']['podIP']}:{port}/metrics") as response:
            found = samples(await response.text())
        return total(found, "vllmsnapshot_reconcile_total"), total(found, "vllmsnapshot_workqueue_depth")

    claims = system.backend.kubectl("get", "vsnap", "-A", "-o", "name").count("\n")
    before, _ = await metrics()
    meta = agent["metadata"]
    system.backend.kubectl("-n", meta["namespace"], "annotate", "pod", meta["name"], "--overwrite", f"test/resync={before:.0f}")

    async def done() -> bool:
        passes, waiting = await metrics()
        return passes > before + claims and not waiting

    await system.until("a resync of the operator", done, 60)
