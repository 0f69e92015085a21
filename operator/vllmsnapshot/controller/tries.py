"""How often in a row a capture came to nothing on a node, and when it is tried again. Pure.

After `capture.retries` tries at once the pauses double, from `FIRST_PAUSE_S` to `LONGEST_PAUSE_S`: each try costs a replica the barrier and
the freeze, and what kept failing seldom mends itself within minutes. No replica is started for a try; when the pause is over, the next one
that starts cold on the node is captured.

Everything is read from the contents. Each order carries how many before it came to nothing (`spec.attempt`), since only the last few
failures are kept. An artifact from which a replica was restored is a success: what comes after it is counted from the beginning.
"""

from __future__ import annotations

from ..api.types import VLLMSnapshotSpec
from ..world import Content, Observed

FIRST_PAUSE_S = 600.0
"""Of a few cold starts of a large model."""

LONGEST_PAUSE_S = 6 * 3600.0
"""Four tries a day cost nobody much, and what was mended without a word is used on the same day."""


def spent(observed: Observed, identity: str, node: str) -> int:
    """Captures in a row of this identity on this node that came to nothing: failed, or quarantined before they were of use.

    Who asks for a recapture asks for new tries: what was ordered before does not count any more.
    """
    mine = _failures(observed, identity, node)
    if not mine:
        return 0
    last = _last(mine)
    # Their number counts, too: contents that an older operator has ordered do not say which try they were.
    return 1 if _useful(last) else max(last.attempt + 1, len(mine))


def again_at(spec: VLLMSnapshotSpec, observed: Observed, identity: str, node: str, now: float) -> float | None:
    """The moment from which on a capture may be ordered on this node (Unix seconds); None: there is no pause.

    `now` decides only which clock is believed: the node's, which says when the try ended, where that is after the order and not in the
    future, else the API server's, which says when it was ordered.
    """
    tries = spent(observed, identity, node)
    if tries <= spec.capture.retries:
        return None
    last = _last(_failures(observed, identity, node))
    ended = last.ended if last.created <= last.ended <= now else last.created
    return ended + pause_s(tries - spec.capture.retries)


def paused(spec: VLLMSnapshotSpec, observed: Observed, identity: str, node: str, now: float) -> bool:
    """Whether no capture may be ordered on this node yet. Whatever a clock says, a try is due within twice the longest pause."""
    moment = again_at(spec, observed, identity, node, now)
    return moment is not None and 0 < moment - now <= LONGEST_PAUSE_S


def pause_s(number: int) -> float:
    """The pause before the try of this number after those that follow at once, from 1 on."""
    return min(FIRST_PAUSE_S * 2.0 ** min(number - 1, 64), LONGEST_PAUSE_S)


def _failures(observed: Observed, identity: str, node: str) -> list[Content]:
    return [
        item
        for item in observed.contents
        if item.identity == identity
        and item.node == node
        and item.recapture == observed.recapture
        and not item.deleting
        and (item.failed or item.quarantined)
    ]


def _last(failures: list[Content]) -> Content:
    return max(failures, key=lambda item: (item.created, item.attempt, item.name))


def _useful(item: Content) -> bool:
    return item.status.restores is not None and item.status.restores.succeeded > 0
