"""What to do next: `plan(claim, observed, now)`, pure and total. Nothing here talks to anybody or remembers anything.

The operator is stateless: every step of a rollout, a capture or a deletion is derived from what exists. A plan is therefore
right after any crash, and a plan that was only half executed is simply made again.

Invariants (tests/unit/test_plan_properties.py):
  live pods <= replicas + maxSurge;   our own deletions never bring available pods below replicas - maxUnavailable;
  at most one order per node and identity is open;   the newest usable artifact of the current identity is never deleted;
  at rest the plan is empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..api import constants as c
from ..api.types import DeletionPolicy, RestorePolicy, Toggle, VLLMSnapshotSpec
from ..objects import label_value
from ..retention import doomed
from ..world import Claim, Content, Observed, Replica
from . import pods
from .recapture import NOT_ASKED, Recapture, look
from .tries import paused, spent

REPLACE_AFTER_S = 30.0
"""A pod that finished (refused by the kubelet, evicted) is replaced no sooner than this long after its creation: a node that
refuses every pod would otherwise be offered a new one several times a second."""
PENDING_SEED_S = 60.0
"""How long others wait for a seed that cannot be scheduled."""


# --- actions: one class per kind, executed in this order ---------------------------------------------------------------


@dataclass(frozen=True)
class AddFinalizer:
    """Before the first content: cluster-scoped objects have no owner that would take them along."""


@dataclass(frozen=True)
class CreateContent:
    """Order a capture of `source` on `node`, under the user's request to recapture, if there is one; `attempt` came to nothing."""

    source: Replica
    node: str
    recapture: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class VerifyUnattended:
    """Set the readiness gate of a pod that serves where no agent could."""

    pod: Replica


@dataclass(frozen=True)
class DeletePod:
    """Remove a replica; `why` is for the log."""

    pod: Replica
    why: str


@dataclass(frozen=True)
class CreatePod:
    """Create the replica of this slot, preferably on one of the nodes `prefer`.

    With `recapture`: to be captured for that request, so it starts cold, on one of `nodes` and nowhere else.
    """

    slot: int
    prefer: tuple[str, ...]
    recapture: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CreateService:
    """There is no Service of the claim's name."""


@dataclass(frozen=True)
class UpdateService:
    """Our Service differs from what it should be."""

    uid: str


@dataclass(frozen=True)
class DeleteService:
    """Our Service is not wanted any more."""

    uid: str


@dataclass(frozen=True)
class DeleteContent:
    """Remove an artifact; `why` is for the log."""

    content: Content
    why: str


@dataclass(frozen=True)
class RestoreLabels:
    """Somebody has changed the label by which the agent of its node finds a content."""

    content: Content


@dataclass(frozen=True)
class RemoveFinalizer:
    """Let the claim go."""


Action = (
    AddFinalizer
    | CreateContent
    | VerifyUnattended
    | DeletePod
    | CreatePod
    | CreateService
    | UpdateService
    | DeleteService
    | DeleteContent
    | RestoreLabels
    | RemoveFinalizer
)


@dataclass(frozen=True)
class Gate:
    """Whether more pods of the current identity may be created. Closed: at most one, the seed, until it has been captured."""

    open: bool
    seed: Replica | None = None
    until: float | None = None
    """When the gate opens by itself (seconds since the epoch)."""

    @property
    def allowance(self) -> int | None:
        """How many pods may be created now; None: no limit."""
        return None if self.open else int(self.seed is None)


@dataclass(frozen=True)
class Plan:
    """Actions in order, when to look again without being woken (seconds), what the pods wait for, and where a recapture stands."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    gate: Gate = Gate(open=True)
    again: Recapture = NOT_ASKED


def plan(claim: Claim, observed: Observed, now: float) -> Plan:
    """See the module's docstring. `now` is seconds since the epoch."""
    if claim.deleting:
        return Plan(tuple(_farewell(claim, observed)))
    if claim.spec is None:
        return Plan()
    spec, hashes = claim.spec, pods.template(claim.spec)
    gate = seed_gate(spec, hashes.identity, observed, now)
    again = look(spec, hashes, observed, capable_nodes(spec, hashes.identity, observed), now)
    captures = list(_captures(spec, hashes.identity, observed, now))
    actions: list[Action] = []
    if not claim.finalizer and (captures or observed.contents):
        actions.append(AddFinalizer())
    actions += captures
    actions += _unattended(observed)
    actions += _replicas(claim, spec, hashes, observed, gate, again, now)
    actions += _service(claim, spec, observed)
    actions += _retention(spec, hashes.identity, observed)
    actions += _labels(observed)
    return Plan(tuple(actions), _requeue(observed, hashes.revision, gate, again, now), gate, again)


# --- capture -----------------------------------------------------------------------------------------------------------


def capable_nodes(spec: VLLMSnapshotSpec, identity: str, observed: Observed) -> frozenset[str]:
    """Nodes on which a capture is worth waiting for: a Ready agent, and tries left that follow at once."""
    return frozenset(node for node in _ready_nodes(spec, observed) if spent(observed, identity, node) <= spec.capture.retries)


def _ready_nodes(spec: VLLMSnapshotSpec, observed: Observed) -> frozenset[str]:
    return (observed.agents & observed.nodes) - observed.strangers if spec.capture.policy == Toggle.ENABLED else frozenset()


def seed_gate(spec: VLLMSnapshotSpec, identity: str, observed: Observed, now: float) -> Gate:
    """Whether all replicas may start, or only the seed.

    N replicas that start cold at once take N GPUs for minutes and leave N equal artifacts; one seed and N-1 restores are
    quicker. But a snapshot is an optimisation: as soon as waiting cannot pay off any more, all start.
    """
    capable = capable_nodes(spec, identity, observed)
    if not capable or spec.restore.policy == RestorePolicy.DISABLED:
        return Gate(open=True)
    if any(observed.usable(item) for item in observed.contents if item.identity == identity):
        return Gate(open=True)
    orders = {item.source_uid: item for item in observed.contents}
    seeds: list[tuple[float, Replica]] = []
    for replica in sorted(observed.pods, key=lambda item: (item.created, item.name)):
        if not replica.live or replica.identity != identity:
            continue
        order = orders.get(replica.uid)
        if order is not None and order.failed:
            return Gate(open=True)  # this was the try; the others need not wait for the next one
        if order is not None and not order.pending:
            continue
        if order is None and (replica.released or replica.restored):
            continue  # it can give no artifact any more, or never could
        if replica.node is not None and replica.node not in observed.agents:
            continue  # started by itself, unattended
        if order is None and replica.node is not None and replica.node not in capable:
            continue
        patience = spec.capture.seed_timeout_seconds
        until = replica.created + (patience if replica.node else min(patience, PENDING_SEED_S))
        if now >= until:
            return Gate(open=True)
        seeds.append((until, replica))
    if not seeds:
        return Gate(open=False)
    return Gate(open=False, seed=seeds[0][1], until=min(until for until, _ in seeds))


def _captures(spec: VLLMSnapshotSpec, identity: str, observed: Observed, now: float) -> Iterator[CreateContent]:
    """One order per node that has a source and neither an artifact nor an open order, unless a pause after failures is not over.

    A replica that was made to be captured again has its order whatever artifact there is, and even when it has left the barrier
    already: the order that fails then is the memory of the try.
    """
    ordered = {item.source_uid for item in observed.contents}
    request = observed.recapture
    for node in sorted(_ready_nodes(spec, observed)):
        if paused(spec, observed, identity, node, now):
            continue
        here = [item for item in observed.contents if item.identity == identity and item.node == node]
        if any(item.pending or (observed.usable(item) and item.recapture == request) for item in here):
            continue
        old = any(observed.usable(item) for item in here)
        sources = [
            replica
            for replica in observed.pods
            if replica.live
            and replica.identity == identity
            and replica.node == node
            and replica.uid not in ordered
            and ((request and replica.recapture == request) or not (old or replica.released or replica.restored))
        ]
        if sources:
            source = min(sources, key=lambda item: (item.created, item.name))
            yield CreateContent(source, node, request, spent(observed, identity, node))


# --- pods --------------------------------------------------------------------------------------------------------------

_AGENT_VERDICTS = (c.Reason.CANARY_MISMATCH, c.Reason.ENGINE_FAILED)


def _unattended(observed: Observed) -> Iterator[VerifyUnattended]:
    """Pods that serve on nodes without a Ready agent. The child has proven its answer itself before it bound the port.

    What an agent has found wrong stays wrong: only an agent takes that back.
    """
    for replica in observed.pods:
        if (
            replica.live
            and replica.node is not None
            and replica.node not in observed.agents
            and replica.containers_ready
            and replica.verified != "True"
            and replica.verified_reason not in _AGENT_VERDICTS
        ):
            yield VerifyUnattended(replica)


def _removal_order(replica: Replica) -> tuple[bool, bool, float, str]:
    """Not ready, then cold, then newest."""
    return (replica.available, replica.restored, -replica.created, replica.name)


def _cooling(replica: Replica, revision: str, now: float) -> bool:
    """Finished so soon after its creation that its replacement must wait."""
    return replica.finished and not replica.deleting and replica.revision == revision and now < replica.created + REPLACE_AFTER_S


def _replicas(
    claim: Claim, spec: VLLMSnapshotSpec, hashes: pods.Template, observed: Observed, gate: Gate, again: Recapture, now: float
) -> Iterator[DeletePod | CreatePod]:
    """Replace, scale and roll: the rules of a Deployment, with the seed gate in front of creation."""
    for replica in observed.pods:
        if replica.finished and not replica.deleting and not _cooling(replica, hashes.revision, now):
            yield DeletePod(replica, "finished")
        elif replica.discard:
            yield DeletePod(replica, replica.report.reason)
    for replica in again.lost:
        yield DeletePod(replica, "its place to be captured again is gone")

    # A cooling pod holds its place: it is neither live nor replaced yet.
    present = [replica for replica in observed.pods if replica not in again.lost]
    counted = [replica for replica in present if replica.live or _cooling(replica, hashes.revision, now)]
    if spec.rollout.max_surge:
        # The one that is to be captured again comes on top, and is one too many as soon as that is over.
        counted = [replica for replica in counted if replica is not again.seed]
    new = [replica for replica in counted if replica.revision == hashes.revision]
    old = [replica for replica in counted if replica.revision != hashes.revision]
    room = spec.replicas + (spec.rollout.max_surge if old and spec.replicas else 0)
    floor = spec.replicas - _unavailable(spec, gate)

    leaving = _leaving(sorted(old, key=_removal_order), sorted(new, key=_removal_order), room, floor)
    for replica in leaving:
        if replica.discard:
            continue
        yield DeletePod(replica, "more than wanted" if replica.revision == hashes.revision else "replaced by a new revision")

    # Counted before the deletions: what they free is used by the next pass, when they have happened.
    missing = min(spec.replicas - len(new), room - len(counted))
    if gate.allowance is not None:
        missing = min(missing, gate.allowance)
    taken = {replica.name for replica in observed.pods} | observed.taken
    prefer = restoring_nodes(spec, hashes.identity, observed)
    # The lowest free names: of two creations decided from the same observation one gets 409 and does no harm.
    free = (slot for slot in itertools.count() if pods.pod_name(claim.name, hashes.revision, slot) not in taken)
    seeds = 0
    if again.idle and not old and gate.allowance != 0:
        if spec.rollout.max_surge:
            seeds = int(len(counted) == spec.replicas)
        elif missing > 0:
            seeds, missing = 1, missing - 1
        elif len(counted) == spec.replicas and (victim := _makes_room(new, again, floor)) is not None:
            yield DeletePod(victim, "makes room for the replica that is captured again")
    for _ in range(seeds):
        yield CreatePod(next(free), (), again.request, again.nodes)
    for _ in range(missing):
        yield CreatePod(next(free), prefer)


def _makes_room(new: list[Replica], again: Recapture, floor: int) -> Replica | None:
    """The replica that a seed may replace where no surge is allowed, best one on a node where it would go."""
    available = sum(replica.available for replica in new)
    for replica in sorted(new, key=lambda item: (item.node not in again.nodes, _removal_order(item))):
        if not replica.finished and (not replica.available or available > floor):
            return replica
    return None


def restoring_nodes(spec: VLLMSnapshotSpec, identity: str, observed: Observed) -> tuple[str, ...]:
    """Nodes on which a new pod of this identity would be restored: an artifact that fits the node as it is now (its GPU and
    driver among the rest) and is worth it, and an agent that can do it."""
    mine = [item for item in observed.contents if item.identity == identity]
    holders = {item.node for item in mine if observed.worthwhile(item, spec.restore.policy)}
    return tuple(sorted((holders & observed.agents) - observed.incapable))


def _unavailable(spec: VLLMSnapshotSpec, gate: Gate) -> int:
    """How many may be missing. While only a seed may start, no more old pods are given up than the seed needs: none if it can
    be an extra one, and has a place."""
    allowed = spec.rollout.max_unavailable
    if not gate.open:
        extra = spec.rollout.max_surge and not (gate.seed and gate.seed.unschedulable)
        allowed = min(allowed, 0 if extra else 1)
    return allowed


def _hopeless(replica: Replica) -> bool:
    """It does not serve, and will not for all that is known."""
    found_wrong = replica.verified == "False" and replica.verified_reason in _AGENT_VERDICTS
    return not replica.available and bool(replica.waiting or replica.unschedulable or found_wrong)


def _leaving(old: list[Replica], new: list[Replica], room: int, floor: int) -> list[Replica]:
    """The pods to delete; both lists are in order of removal."""
    available = sum(replica.available for replica in (*old, *new))
    leaving: list[Replica] = []

    def take(candidates: Iterable[Replica], limit: int) -> None:
        nonlocal available
        for replica in candidates:
            if limit <= 0:
                return
            if replica in leaving or (replica.available and available <= floor):
                continue
            available -= replica.available
            limit -= 1
            leaving.append(replica)

    # Too many in all: a scale-down. Old ones first.
    excess = len(old) + len(new) - room
    take(old, excess)
    take(new, excess - len(leaving))
    # Old ones that do not serve, as far as new ones which do not serve either leave room for hope (as a Deployment).
    total = len(old) + len(new) - len(leaving)
    waiting = [replica for replica in new if not replica.available and replica not in leaving]
    take([replica for replica in old if not replica.available], total - floor - len(waiting))
    # No hope lies in new ones that find no place: on a full cluster, broken old ones would keep the GPUs for ever.
    total = len(old) + len(new) - len(leaving)
    take([replica for replica in old if _hopeless(replica)], total - floor - sum(not item.unschedulable for item in waiting))
    # Old ones that serve, as far as enough others do.
    take([replica for replica in old if replica.available], available - floor)
    return leaving


# --- service -----------------------------------------------------------------------------------------------------------


def _service(claim: Claim, spec: VLLMSnapshotSpec, observed: Observed) -> Iterator[Action]:
    """Ours is created, corrected and removed; a foreign one is never touched (status says NameConflict)."""
    there = observed.service
    if spec.serving.service == Toggle.ENABLED:
        if there is None:
            if pods.service_name_valid(claim.name):
                yield CreateService()
        elif there.ours and not there.current:
            yield UpdateService(there.uid)
    elif there is not None and there.ours:
        yield DeleteService(there.uid)


# --- artifacts ---------------------------------------------------------------------------------------------------------


def _retention(spec: VLLMSnapshotSpec, identity: str, observed: Observed) -> Iterator[DeleteContent]:
    """What `retention.doomed` says: the CLI shows the same."""
    for content, why in doomed(spec, identity, observed):
        yield DeleteContent(content, why)


def _labels(observed: Observed) -> Iterator[RestoreLabels]:
    for item in observed.contents:
        if item.node_label is not None and item.node_label != label_value(item.node):
            yield RestoreLabels(item)


def plan_orphans(contents: Iterable[Content], nodes: frozenset[str]) -> list[Content]:
    """Contents whose node does not exist any more: no agent is left to remove the files, and no files either."""
    return [item for item in contents if item.node not in nodes]


# --- deletion, time ----------------------------------------------------------------------------------------------------


def _farewell(claim: Claim, observed: Observed) -> Iterator[Action]:
    """Pods, then contents (unless they are retained), then the finalizer.

    A content counts as gone once its deletion is recorded: its own finalizer makes its agent remove the files, and a node
    that is down for a week must not keep the claim's namespace from being deleted.
    """
    if not claim.finalizer:
        return
    rest: list[Action] = [DeletePod(replica, "snapshot deleted") for replica in observed.pods if not replica.deleting]
    if claim.deletion_policy == DeletionPolicy.DELETE:
        rest += [DeleteContent(item, "snapshot deleted") for item in observed.contents if item.evicted or not item.deleting]
    yield from rest
    yield from _labels(observed)  # or the agent never sees that it goes
    if not rest:
        yield RemoveFinalizer()


def _requeue(observed: Observed, revision: str, gate: Gate, again: Recapture, now: float) -> float | None:
    """Seconds until something changes without an event: the gate opens, a finished pod may be replaced, a seed's time is up."""
    moments = [replica.created + REPLACE_AFTER_S for replica in observed.pods if _cooling(replica, revision, now)]
    moments += [moment for moment in (gate.until, again.until) if moment is not None]
    return max(0.0, min(moments) - now) + 0.1 if moments else None
