"""Reads what a plan depends on, by live LISTs. The watch only says when to look, never what is there: a watch can be behind,
and it tells nothing of what was deleted while it was down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..api import constants as c
from ..kube import CONTENTS, NODES, PODS, SERVICES, SNAPSHOT_NODES, SNAPSHOTS, Kube, Object
from ..objects import condition, is_true, label_value
from ..world import Claim, Content, Observed, Replica, ServiceView, controlled_by, recapture
from . import pods
from .plan import plan_orphans

Key = tuple[str, str]
"""Namespace and name of a VLLMSnapshot."""


@dataclass(frozen=True)
class ClusterView:
    """What all claims share."""

    agents: frozenset[str]
    nodes: frozenset[str]
    environments: dict[str, dict[str, str]]
    incapable: frozenset[str]
    strangers: frozenset[str]


class Observer:
    """Observes claims. Agents live in `agent_namespace`.

    The cluster-wide lists are shared by observations that begin within `share_s` seconds: the resync wakes every key at once.
    """

    def __init__(
        self, kube: Kube, agent_namespace: str, *, share_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._agent_namespace = agent_namespace
        self._share_s = share_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._view: tuple[float, ClusterView] | None = None

    async def claim(self, key: Key) -> tuple[Claim, Observed] | None:
        """The claim and all around it, or None if it does not exist."""
        namespace, name = key
        obj = await self._kube.get(SNAPSHOTS, name, namespace)
        if obj is None:
            return None
        claim = Claim.parse(obj)
        if claim.spec is not None and (problem := pods.problem(claim, claim.spec)) is not None:
            claim = replace(claim, spec=None, invalid=problem)
        named = pods.selector_text({c.LABEL_SNAPSHOT: label_value(name), c.LABEL_ROLE: c.ROLE_REPLICA})
        mine = pods.selector_text({c.LABEL_SNAPSHOT_UID: claim.uid})
        pod_list, contents, service, view = await asyncio.gather(
            self._kube.list(PODS, namespace, labels=named),
            self._kube.list(CONTENTS, labels=mine),
            self._kube.get(SERVICES, name, namespace),
            self.cluster(),
        )
        return claim, Observed(
            pods=tuple(Replica.parse(pod) for pod in pod_list if controlled_by(pod, claim.uid)),
            taken=frozenset(pod["metadata"]["name"] for pod in pod_list if not controlled_by(pod, claim.uid)),
            contents=tuple(Content.parse(item) for item in contents if item["spec"]["snapshotRef"]["uid"] == claim.uid),
            agents=view.agents,
            nodes=view.nodes,
            environments=view.environments,
            incapable=view.incapable,
            strangers=view.strangers,
            service=_service(claim, service),
            recapture=recapture(obj),
        )

    async def cluster(self) -> ClusterView:
        """Nodes, agents and what the agents say of their nodes; at most `share_s` seconds old."""
        async with self._lock:
            now = self._clock()
            if self._view is None or now - self._view[0] > self._share_s:
                labels = pods.selector_text({c.LABEL_COMPONENT: c.COMPONENT_AGENT})
                agents, nodes, reports = await asyncio.gather(
                    self._kube.list(PODS, self._agent_namespace, labels=labels),
                    self._kube.list(NODES),
                    self._kube.list(SNAPSHOT_NODES),
                )
                self._view = (now, _view(agents, nodes, reports))
            return self._view[1]

    async def keys(self, namespaces: tuple[str, ...] = ()) -> list[Key]:
        """All claims there are, in these namespaces (all of the cluster if none is given)."""
        found: list[Object] = []
        for namespace in namespaces or (None,):
            found += await self._kube.list(SNAPSHOTS, namespace)
        return [(item["metadata"]["namespace"], item["metadata"]["name"]) for item in found]

    async def orphans(self) -> list[Content]:
        """Contents of vanished nodes. The nodes are read after the contents: a content that is new here has its node there."""
        mine = pods.selector_text({c.LABEL_MANAGED_BY: c.MANAGED_BY})
        contents = [Content.parse(item) for item in await self._kube.list(CONTENTS, labels=mine)]
        if not contents:
            return []
        nodes = frozenset(item["metadata"]["name"] for item in await self._kube.list(NODES))
        return plan_orphans(contents, nodes)


def _view(agents: list[Object], nodes: list[Object], reports: list[Object]) -> ClusterView:
    return ClusterView(
        agents=frozenset(
            pod["spec"]["nodeName"]
            for pod in agents
            if pod["spec"].get("nodeName") and is_true(pod, "Ready") and "deletionTimestamp" not in pod["metadata"]
        ),
        nodes=frozenset(item["metadata"]["name"] for item in nodes),
        environments={item["metadata"]["name"]: (item.get("status") or {}).get("environment") or {} for item in reports},
        incapable=frozenset(item["metadata"]["name"] for item in reports if condition(item, c.READY).get("status") == "False"),
        strangers=frozenset(item["metadata"]["name"] for item in reports if _spoken(item) not in (None, c.NODE_PROTOCOL)),
    )


def _spoken(report: Object) -> object:
    """The protocol of an agent, None where it has not told."""
    return (report.get("status") or {}).get("protocolVersion")


def _service(claim: Claim, service: Object | None) -> ServiceView | None:
    if service is None:
        return None
    ours = controlled_by(service, claim.uid)
    current = claim.spec is not None and pods.service_is_current(service, pods.service(claim, claim.spec))
    return ServiceView(uid=service["metadata"]["uid"], ours=ours, current=ours and current)
