"""Which artifact of a node goes first when its store is full: the agent evicts by it, the CLI shows it. Pure.

`retention.py` says what nobody needs any more. This says what is missed least, so that a full store costs a cold start somewhere
rather than the capture of a replica that is here now. Least useful first:

1. Broken: nothing may be restored from it (failed, quarantined, stale, being deleted, or no content stands for it).
2. Superseded: its snapshot has a usable artifact on this node that was ordered later.
3. Idle: no replica of its snapshot and identity is on this node (at 0 replicas there is none anywhere).

Within each the one that was used longest ago goes first; being captured counts as a use. Never evicted: what is being captured,
restored from or verified, and the newest usable artifact of an identity that a replica on this node has. That replica would
restart from it; two snapshots that took turns in evicting each other would both start cold for ever.

All of it is known on the node: its contents, its pods, its ledger. So an agent needs no right to read snapshots, and can decide
while a replica waits at the barrier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .api import constants as c
from .objects import Object, timestamp
from .world import Content, Observed

Use = tuple[str, str]
"""UID of a snapshot, and an identity: what a replica could be restored from."""


class Standing(IntEnum):
    """How much an artifact would be missed, least first."""

    BROKEN = 0
    SUPERSEDED = 1
    IDLE = 2
    NEEDED = 3


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """Files in the store of a node."""

    content: str
    uid: str = ""
    use: Use = ("", "")
    bytes: int = 0
    ordered: float = 0.0
    """When its content was created (by the API server's clock, which nobody on the node sets back)."""
    used: float = 0.0
    """When it was captured or restored from last."""
    broken: str = ""
    """Why nothing may be restored from it; empty if it may."""
    busy: bool = False
    """Its files are being written or read."""


def artifact(obj: Object, environment: Mapping[str, str], *, size: int | None = None, used: float = 0.0) -> Artifact:
    """The artifact of a content, on a node that has these facts now. `size` and `used` are what the caller knows better."""
    item = Content.parse(obj)
    record, restores = item.status.artifact, item.status.restores
    stale = Observed(environments={item.node: environment}).stale(item)
    broken = next(
        (
            why
            for wrong, why in (
                (item.deleting, "is being deleted"),
                (item.failed, "its capture failed"),
                (item.quarantined, "quarantined"),
                (stale is not None, f"stale: {stale}"),
            )
            if wrong
        ),
        "",
    )
    restored = timestamp(restores.last_succeeded_at) if restores else 0.0
    return Artifact(
        content=item.name,
        uid=item.uid,
        use=(str(((obj.get("spec") or {}).get("snapshotRef") or {}).get("uid") or ""), item.identity),
        bytes=size if size is not None else record.bytes if record else 0,
        ordered=item.created,
        used=max(used, item.captured_at, restored),
        broken=broken,
        # Ordered, and not answered: its files are being written, or have just been.
        busy=item.pending,
    )


def uses(pods: Iterable[Object], node: str) -> frozenset[Use]:
    """What the replicas on a node could be restored from."""
    found = set()
    for pod in pods:
        meta, status = pod["metadata"], pod.get("status") or {}
        if (pod.get("spec") or {}).get("nodeName") != node or status.get("phase") in ("Succeeded", "Failed"):
            continue
        identity = (meta.get("labels") or {}).get(c.LABEL_IDENTITY, "")
        found |= {(str(ref["uid"]), identity) for ref in meta.get("ownerReferences") or [] if ref.get("controller")}
    return frozenset(found)


def standing(item: Artifact, others: Iterable[Artifact], needed: Collection[Use]) -> Standing:
    """Of one artifact among those of its node; `needed` is what the replicas there could be restored from (`uses`)."""
    if item.broken:
        return Standing.BROKEN
    later = [x for x in others if not x.broken and x.use[0] == item.use[0] and _age(x) > _age(item)]
    if any(x.use == item.use for x in later):
        return Standing.SUPERSEDED
    if item.use in needed:
        return Standing.NEEDED
    return Standing.SUPERSEDED if later else Standing.IDLE


def _age(item: Artifact) -> tuple[float, str]:
    return item.ordered, item.content


def evictable(items: Sequence[Artifact], needed: Collection[Use]) -> list[tuple[Artifact, Standing]]:
    """What may go from a node, least useful first."""
    ranked = [(item, standing(item, items, needed)) for item in items if not item.busy]
    ranked = [(item, rank) for item, rank in ranked if rank < Standing.NEEDED]
    return sorted(ranked, key=lambda pair: (pair[1], pair[0].used, pair[0].content))


MEANING: Mapping[Standing, str] = {
    Standing.SUPERSEDED: "superseded by a later artifact of its snapshot",
    Standing.IDLE: "no replica of its identity is on the node",
}


def why(item: Artifact, rank: Standing) -> str:
    """In words."""
    return item.broken or MEANING[rank]
