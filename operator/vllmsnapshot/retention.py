"""Which artifacts nobody needs any more: the operator removes them, `kubectl vsnap artifacts gc` tells which and why. Pure.

Never removed: what pods may still restart from, what a starting pod may be reading, and open orders (their agent answers
them). Contents of vanished nodes are not this rule's business: the operator's housekeeping buries them.
"""

from __future__ import annotations

from collections import defaultdict

from .api.types import VLLMSnapshotSpec
from .world import Content, Observed, age


def doomed(spec: VLLMSnapshotSpec, identity: str, observed: Observed) -> list[tuple[Content, str]]:
    """The contents of a claim to be removed, each with the reason; `identity` is that of its spec.

    `retain` identities are kept per node, counting the current one; what was superseded or came to nothing goes. The current
    one counts where it has no artifact yet too (it is not wanted on every node), but only once it has one anywhere: until then
    the artifact before it is all there is.
    """
    in_use = {replica.identity for replica in observed.pods if not replica.finished} | {identity}
    exists = any(observed.usable(item) for item in observed.contents if item.identity == identity)
    by_node: dict[str, list[Content]] = defaultdict(list)
    for item in observed.contents:
        if not item.deleting and not item.pending and item.node in observed.nodes:
            by_node[item.node].append(item)
    found = [(item, "evicted from a full store") for item in observed.contents if item.evicted]
    for node in sorted(by_node):
        starting = [replica for replica in observed.pods if replica.live and replica.node == node and not replica.released]
        reading = {replica.identity for replica in starting}
        gone = _superseded(spec, in_use, by_node[node], observed)
        kept = [item for item in by_node[node] if item.name not in {other.name for other, _ in gone}]
        last: dict[str, float] = defaultdict(float)
        for item in kept:
            last[item.identity] = max(last[item.identity], item.captured_at)
        # Identities in use count, so that `retain: 1` means one artifact once a rollout is over.
        others = sorted(last.keys() - {identity}, key=lambda key: (key not in in_use, -last[key], key))
        expired = {key for key in others[spec.artifact.retain - exists :] if key not in in_use}
        gone += [(item, "beyond artifact.retain") for item in kept if item.identity in expired]
        found += [(item, why) for item, why in gone if not (observed.usable(item) and item.identity in reading)]
    return found


def _superseded(
    spec: VLLMSnapshotSpec, in_use: set[str], contents: list[Content], observed: Observed
) -> list[tuple[Content, str]]:
    """Contents of one node that another of the same identity has replaced, and failures beyond those that are counted.

    A recapture counts its failures while the artifact from before it is in use.
    """
    gone: list[tuple[Content, str]] = []
    for identity in sorted({item.identity for item in contents}):
        here = [item for item in contents if item.identity == identity]
        # Ordered last, by the API server's clock: that of a node may have been set back.
        best = max((item for item in here if observed.usable(item)), key=lambda item: (item.created, *age(item)), default=None)
        others = sorted((item for item in here if item is not best), key=lambda item: (item.captured_at, item.name), reverse=True)
        failures = [item for item in others if item.failed or item.quarantined]
        if best is not None:
            tries = failures if observed.recapture and best.recapture != observed.recapture else []
            counted = [item for item in tries if item.recapture == observed.recapture][: spec.capture.retries + 1]
            gone += [(item, f"superseded by {best.name}") for item in others if item not in counted]
            continue
        # No good one: the failures are the memory of how often it was tried, and what is stale may become true again.
        stale = [item for item in others if not (item.failed or item.quarantined)]
        limit = spec.capture.retries + 1 if identity in in_use else 0
        gone += [(item, "came to nothing") for item in failures[limit:]] + [(item, "stale") for item in stale[1:]]
    return gone
