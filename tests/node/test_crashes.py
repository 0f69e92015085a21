"""Parts that die: the engine, the pod, the agent in the middle of its work, the operator in the middle of a scale-up, all agents."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.node.snapshot import Make, Snapshot, answer, names, report, restarts, starts
from tests.nodeview import NodeView
from tests.system import SYSTEM_NAMESPACE, System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import PODS, Object
from vllmsnapshot_child.protocol import HELLO, HOLD, RESTORED, START

R = c.Reason
AGENTS = f"{c.LABEL_COMPONENT}={c.COMPONENT_AGENT}"
OPERATORS = f"{c.LABEL_COMPONENT}={c.COMPONENT_OPERATOR}"


async def system_pod(system: System, labels: str) -> Object:
    """The only pod of a component, Ready."""

    async def probe() -> Object | None:
        pods = await system.kube.list(PODS, SYSTEM_NAMESPACE, labels=labels)
        return pods[0] if len(pods) == 1 and condition(pods[0], "Ready") == "True" else None

    return await system.until(f"one ready pod of {labels}", probe, 60)


@pytest.fixture
async def kill_agent(system: System, node: NodeView) -> AsyncIterator[Callable[[], int]]:
    """Kill the agent as the kernel would. Afterwards it gets a new pod, so that no back-off is left to the next test."""
    uid = (await system_pod(system, AGENTS))["metadata"]["uid"]
    yield lambda: node.kill(uid, "vllmsnapshot-agent")
    system.backend.kubectl("-n", SYSTEM_NAMESPACE, "delete", "pod", "-l", AGENTS, "--wait=true", "--grace-period=5")
    await system_pod(system, AGENTS)


# --- the engine and its pod ---


@pytest.mark.parametrize(
    ("how", "code"), [("exit", 17), ("finish", 0), ("kill", 128 + signal.SIGKILL), ("memory", 128 + signal.SIGKILL)]
)
async def test_a_crashed_engine_is_restored_in_the_same_pod(how: str, code: int, make: Make, node: NodeView) -> None:
    """Whatever it was: an error, an end that looks like success, a kill, the kernel for want of memory."""
    snap = await make(f"crash-{how}", resources={"limits": {"memory": "512Mi"}})
    seed, content = await snap.seeded()
    uid = seed["metadata"]["uid"]
    if how == "kill":
        assert node.kill(uid, "vllmsnapshot_child.server")
    else:
        await snap.crash(seed, how)

    async def back() -> Object | None:
        # Readiness and report are two writes: for a moment a Ready pod still carries the report of the container before.
        pod = await snap.pod(seed["metadata"]["name"])
        told = (report(pod).restarts, report(pod).state) == (1, "Serving")
        return pod if restarts(pod) == 1 and condition(pod, "Ready") == "True" and told else None

    pod = await snap.system.until("the pod to be ready again", back, 60)
    assert pod["metadata"]["uid"] == uid
    assert (report(pod).start, report(pod).content) == (c.START_RESTORE, content)
    (status,) = [s for s in pod["status"]["containerStatuses"] if s["name"] == c.CONTAINER]
    assert status["lastState"]["terminated"]["exitCode"] == code
    assert await snap.ask(pod) == answer()
    snap.never_wrong(answer())

    async def ticked() -> bool:
        return bool(snap.ticks(pod))  # the engine writes a line a second, and may not have come to the next one

    await snap.system.until("the log of the new container", ticked, 30)
    assert snap.ticks(pod, "--previous")[0] == 0
    assert len(await snap.pods()) == 1
    assert len(snap.seen.contents) == 1, "nothing new was captured"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("reload=exit", R.RESTORE_DIED), ("answer=wrong", R.CANARY_MISMATCH), ("reload=hang", R.RESTORE_TIMEOUT)],
    ids=["dies", "answers-wrong", "hangs"],
)
async def test_a_restored_engine_that_fails_before_it_serves(fault: str, reason: str, make: Make, node: NodeView) -> None:
    """It is cleared away, and the replica starts cold in the same container; the budget of one failure is spent."""
    snap = await make(f"fails-{fault.partition('=')[2]}", restore={"timeoutSeconds": 8, "failureBudget": 1})
    seed, content = await snap.seeded()
    snap.scale(2)
    pod = await snap.newcomer([seed])
    uid = pod["metadata"]["uid"]
    order = node.control(uid) / "fault"
    first = json.loads(await node.control_file(uid, HELLO))["incarnation"]
    order.write_text(fault)

    def over() -> bool:
        try:
            return first not in (node.control(uid) / HELLO).read_text()
        except FileNotFoundError:  # init clears the control files first
            return True

    await node.when("the container to start over", over)
    order.unlink()
    await snap.ready(2)
    pod = await snap.pod(pod["metadata"]["name"])
    assert restarts(pod) == 0
    assert report(pod).start == c.START_COLD
    assert reason in f"{report(pod).reason}: {report(pod).message}"
    assert await snap.ask(pod) == answer()
    assert len(node.processes(uid)) == 3, "something of the failed restore is left"
    snap.never_wrong(answer())

    async def quarantined() -> bool:
        return c.QUARANTINED in snap.seen.content_conditions(content)

    await snap.system.until("the artifact to be quarantined", quarantined, 30)


async def test_deletion_ends_every_process_in_time(make: Make, node: NodeView, system: System) -> None:
    snap = await make("term")
    await snap.seeded()
    snap.scale(2)
    pods = await snap.ready(2)
    processes = [pid for pod in pods for pid in node.processes(pod["metadata"]["uid"])]
    assert len(processes) == 2 * 3, "init, server and helper in each"
    handles = [os.pidfd_open(pid) for pid in processes]
    try:
        began = time.monotonic()
        snap.scale(0)
        await system.until(
            "the pods to be gone",
            lambda: _none_left(system, snap),
            35,
        )
        assert time.monotonic() - began < 20, "the grace period is 30 s: something had to be killed"
        assert not [pid for pid, fd in zip(processes, handles, strict=True) if not _ended(fd)]
    finally:
        for fd in handles:
            os.close(fd)
    assert not [pid for pod in pods for pid in node.processes(pod["metadata"]["uid"])]
    assert "vllmsnapshot_child" not in _command_lines(node, [pod["metadata"]["uid"] for pod in pods])


async def _none_left(system: System, snap: Snapshot) -> bool:
    return not await system.kube.list(PODS, snap.namespace, labels=f"{c.LABEL_SNAPSHOT}={snap.name}")


def _ended(pidfd: int) -> bool:
    """A pidfd is readable when its process has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def _command_lines(node: NodeView, uids: list[str]) -> str:
    return " ".join(part for uid in uids for argv in node.processes(uid).values() for part in argv)


# --- the agent ---


async def test_agent_killed_during_a_capture(make: Make, node: NodeView, system: System, kill_agent: Callable[[], int]) -> None:
    snap = await make("kill-capture", args=["--memory-mib=64", "--cold-start-s=1"])
    pod = await snap.first_pod()
    await node.control_file(pod["metadata"]["uid"], HOLD)
    assert kill_agent() == 1
    (pod,) = await snap.ready(1, timeout_s=90)
    assert restarts(pod) == 0
    assert await snap.ask(pod) == answer(mib=64)
    snap.never_wrong(answer(mib=64))

    async def told() -> bool:
        conditions = [snap.seen.content_conditions(name) for name in snap.seen.contents]
        return bool(conditions) and all(found.keys() & {c.CAPTURED, c.FAILED} for found in conditions)

    await system.until("the order to be answered", told, 60)
    (name,) = snap.seen.contents
    found = snap.seen.content_conditions(name)
    if c.FAILED in found:
        assert found[c.FAILED]["reason"] == R.AGENT_RESTARTED

        async def swept() -> bool:
            return node.artifact(name) is None

        await system.until("what the capture left to be swept up", swept, 60)
        # A later cold start is captured, as if nothing had happened.
        snap.scale(2)
        await snap.ready(2)
        await system.wait_captured(snap.name, after=name)
    assert not list((node.cluster.store_dir / "tmp").iterdir())


@pytest.mark.parametrize(("file", "text"), [(START, '"restore"'), (RESTORED, "")], ids=["when-decided", "when-restored"])
async def test_agent_killed_during_a_restore(
    file: str, text: str, make: Make, node: NodeView, system: System, kill_agent: Callable[[], int]
) -> None:
    snap = await make(f"kill-{file.partition('.')[0]}", args=["--memory-mib=64"])
    seed, _ = await snap.seeded()
    snap.scale(2)
    pod = await snap.newcomer([seed])
    uid = pod["metadata"]["uid"]
    await node.control_file(uid, file, text)
    assert kill_agent() == 1
    await snap.ready(2, timeout_s=90)
    pod = await snap.pod(pod["metadata"]["name"])
    assert await snap.ask(pod) == answer(mib=64)
    snap.never_wrong(answer(mib=64))
    # Whichever way it came up in the end, there is one engine in it and nothing of an abandoned restore.
    assert sorted(len(argv) > 0 for argv in node.processes(uid).values()) == [True] * 3, node.processes(uid)
    assert report(pod).start in (c.START_COLD, c.START_RESTORE)
    if report(pod).start == c.START_COLD:
        assert report(pod).reason
    # The artifact is as good as before.
    before = await snap.pods()
    snap.scale(3)
    newest = await snap.newcomer(before)
    await snap.ready(3)
    assert report(await snap.pod(newest["metadata"]["name"])).start == c.START_RESTORE


@pytest.fixture
async def no_agent(system: System) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Take every agent away (a node selector that no node has); they come back at the end."""

    name = system.backend.kubectl("-n", SYSTEM_NAMESPACE, "get", "daemonset", "-l", AGENTS, "-o", "name").strip()

    def choose(value: str) -> None:
        patch = f'{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"test/nowhere":{value}}}}}}}}}}}'
        system.backend.kubectl("-n", SYSTEM_NAMESPACE, "patch", name, "--type=merge", "-p", patch)

    async def gone() -> bool:
        return not await system.kube.list(PODS, SYSTEM_NAMESPACE, labels=AGENTS)

    async def remove() -> None:
        choose('"x"')
        await system.until("the agents to go", gone, 60)

    yield remove
    choose("null")
    await system_pod(system, AGENTS)


async def test_without_any_agent_replicas_start_cold(make: Make, system: System, no_agent: Callable[[], Awaitable[None]]) -> None:
    old = await make("left")
    seed, _ = await old.seeded()
    await no_agent()
    new = await make("alone")
    old.scale(2)
    (first,) = await new.ready(1)
    pods = await old.ready(2)

    for snap, pod in ((new, first), (old, next(p for p in pods if names([p]) != names([seed])))):
        assert restarts(pod) == 0
        assert condition(pod, c.CONDITION_VERIFIED, "reason") == R.UNATTENDED
        assert await snap.ask(pod) == answer()
    # What served goes on.
    assert condition(await old.pod(seed["metadata"]["name"]), "Ready") == "True"
    assert await old.ask(seed) == answer()
    old.never_wrong(answer())

    async def told() -> bool:
        found = await new.get()
        return condition(found, c.SNAPSHOT_READY, "reason") == R.UNATTENDED and condition(found, c.READY) == "True"

    await system.until("the status to say that no agent is there", told, 30)


# --- the operator ---


async def test_operator_killed_during_a_scale_up(make: Make, node: NodeView, system: System) -> None:
    snap = await make("kill-operator")
    seed, _ = await snap.seeded()
    operator = await system_pod(system, OPERATORS)
    snap.scale(4)
    await snap.newcomer([seed])
    assert node.kill(operator["metadata"]["uid"], "vllmsnapshot-operator") == 1
    pods = await snap.ready(4, timeout_s=90)
    assert starts(pods) == [c.START_COLD, *[c.START_RESTORE] * 3]
    assert len(snap.seen.pods) == 4, "a pod was created that was not wanted"
    assert len(snap.seen.contents) == 1

    async def restarted() -> bool:
        found = await system_pod(system, OPERATORS)
        return bool(found["status"]["containerStatuses"][0]["restartCount"] == 1)

    await system.until("the operator to be back", restarted, 60)
    snap.scale(1)
    await snap.ready(1)
    snap.never_wrong(answer())
