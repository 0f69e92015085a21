"""Settings of a pod that decide whether its process can travel."""

from __future__ import annotations

from tests.node.snapshot import Make, answer, report, starts
from tests.system import condition
from vllmsnapshot.agent.seccomp import PROFILE
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import Object


async def test_replicas_under_the_agents_own_seccomp_profile(make: Make) -> None:
    profile = {"type": "Localhost", "localhostProfile": PROFILE}
    snap = await make("seccomp", podTemplate={"spec": {"securityContext": {"seccompProfile": profile}}})
    await snap.seeded()
    snap.scale(2)
    pods = await snap.ready(2)
    assert starts(pods) == [c.START_COLD, c.START_RESTORE]
    assert [await snap.ask(pod) for pod in pods] == [answer()] * 2
    for pod in pods:
        assert pod["spec"]["securityContext"]["seccompProfile"] == profile


async def test_an_abstract_socket_travels_in_a_pod_network(make: Make) -> None:
    snap = await make("abstract", args=["--abstract-socket"])
    await snap.seeded()
    snap.scale(3)
    pods = await snap.ready(3)
    assert starts(pods) == [c.START_COLD, c.START_RESTORE, c.START_RESTORE]
    assert [await snap.ask(pod) for pod in pods] == [answer()] * 3


async def test_an_abstract_socket_on_the_nodes_network_is_refused_and_the_replica_serves(make: Make) -> None:
    network = {"hostNetwork": "Enabled", "portRange": {"start": 21010, "end": 21019}}
    snap = await make("abstract-host", args=["--abstract-socket"], serving=network)
    (pod,) = await snap.ready(1)
    assert report(pod).start == c.START_COLD
    assert await snap.ask(pod) == answer()

    async def failed() -> Object | None:
        found = [x for x in await snap.contents() if condition(x, c.FAILED) == "True"]
        return found[0] if found else None

    content = await snap.system.until("a failed capture", failed, 30)
    assert condition(content, c.FAILED, "reason") == c.Reason.PREFLIGHT_ABSTRACT_SOCKET
    assert "serving.hostNetwork: Disabled" in (condition(content, c.FAILED, "message") or "")
