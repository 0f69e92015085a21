"""Taking artifacts again because a user asks for it (annotation `recapture` of the claim). Pure.

One extra replica at a time starts cold on a node whose artifact is older than the request, is captured, and goes; where no
surge is allowed it takes the place of a replica. The old artifact is used by everybody else until the new one is durable, and
stays if no new one comes of it.

The request is compared for equality only, never as a time: every content that is ordered under it carries it, so what is to
be done, what is done and how often it was tried are read from the contents. Clocks play no part.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..api.types import VLLMSnapshotSpec
from ..world import Content, Observed, Replica
from . import pods


@dataclass(frozen=True)
class Recapture:
    """What the request comes down to at this moment."""

    request: str = ""
    old: frozenset[str] = frozenset()
    """Nodes whose artifact was taken before the request."""
    new: frozenset[str] = frozenset()
    """Nodes whose artifact was taken under it."""
    nodes: tuple[str, ...] = ()
    """Nodes on which a replica may be captured for it: there is something to replace (or nothing anywhere), and tries are left."""
    seed: Replica | None = None
    """The replica that is under way to be captured."""
    lost: tuple[Replica, ...] = ()
    """Replicas that wait for a place on nodes where nobody is to be captured any more."""
    until: float | None = None
    """When its time is up (seconds since the epoch)."""
    failure: Content | None = None
    """The last order under the request that came to nothing."""
    ordered: bool = False
    """An order of this identity is open, by whatever replica."""

    @property
    def done(self) -> bool:
        """Everything that the request asks for is there."""
        return bool(self.request and self.new) and not self.old

    @property
    def idle(self) -> bool:
        """A replica should start for it, and none has."""
        return bool(self.nodes) and self.seed is None and not self.ordered


NOT_ASKED = Recapture()


def look(spec: VLLMSnapshotSpec, hashes: pods.Template, observed: Observed, capable: frozenset[str], now: float) -> Recapture:
    """Where the request stands. `capable`: nodes on which a capture may be tried (see `plan.capable_nodes`)."""
    request = observed.recapture
    if not request:
        return Recapture(lost=_lost(observed, None))
    mine = [item for item in observed.contents if item.identity == hashes.identity and not item.deleting]
    usable = [item for item in mine if observed.usable(item)]
    new = frozenset(item.node for item in usable if item.recapture == request)
    old = frozenset(item.node for item in usable) - new
    todo = old if old or new else capable
    nodes = tuple(sorted(todo & capable)) if spec.replicas else ()
    failures = [item for item in mine if item.recapture == request and (item.failed or item.quarantined)]
    seed, until = _seed(spec, hashes, observed, nodes, now)
    return Recapture(
        request=request,
        old=old,
        new=new,
        nodes=nodes,
        seed=seed,
        lost=_lost(observed, seed),
        until=until,
        failure=max(failures, key=lambda item: (item.created, item.name), default=None),
        ordered=any(item.pending for item in mine),
    )


def _seed(
    spec: VLLMSnapshotSpec, hashes: pods.Template, observed: Observed, nodes: tuple[str, ...], now: float
) -> tuple[Replica | None, float | None]:
    """The replica under way, and until when it is waited for. A rollout comes first: beside old replicas there is none."""
    live = [replica for replica in observed.pods if replica.live]
    if not nodes or any(replica.revision != hashes.revision for replica in live):
        return None, None
    orders = {item.source_uid: item for item in observed.contents}
    for replica in sorted(live, key=lambda item: (item.created, item.name)):
        order = orders.get(replica.uid)
        if replica.recapture != observed.recapture or (order is not None and not order.pending):
            continue
        if replica.node is None and replica.only & set(nodes):
            return replica, None  # it costs nothing, and says why it waits
        until = replica.created + spec.capture.seed_timeout_seconds
        if replica.node in nodes and now < until:
            return replica, until
    return None, None


def _lost(observed: Observed, seed: Replica | None) -> tuple[Replica, ...]:
    """They are bound to the nodes of a moment that is over, and would wait there for ever."""
    return tuple(item for item in observed.pods if item.live and item.recapture and item.node is None and item is not seed)
