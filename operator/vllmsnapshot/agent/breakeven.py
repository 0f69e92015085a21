"""Whether restoring an artifact is worth it on this node, by what was measured here. Pure.

Compared is what a replica waits for once the agent has decided, since scheduling, pulling and creating the container are the same
both ways. Cold: what the captured replica took to its barrier, less the steps that only a capture needs; plain vLLM would serve
about then. Restored: from the first step of the restore until it serves, so without the wait for one of the node's slots.

Only restores count that no other restore of this node overlapped. The cold start was measured alone (others wait for the seed), and
several at once share the disk, as several cold starts would: a burst says nothing of which is quicker.

The breaker is open when each of the last `SAMPLES` restores was clearly slower (`MARGIN`, `LOSS_S`). Half-open: `PROBE_AFTER_S` after the
last restore one replica is restored all the same, and a quick one closes it. All of it follows from what the ledger remembers; a new
artifact has a ledger entry of its own, and begins without a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vllmsnapshot_child.protocol import READY, START

from .control import Files
from .ledger import Entry

SAMPLES = 3
"""Restores in a row that must agree: one that met another load proves nothing."""

MARGIN = 1.1
"""Within a tenth of one another neither is clearly the quicker one; what the cold figure lacks, binding the port, is less."""

LOSS_S = 5.0
"""Seconds that a restore must be slower at least. A cold start of vLLM takes tens of seconds; where it takes less, the difference is as
much the machine's as theirs."""

PROBE_AFTER_S = 3600.0
"""A disk that was busy or has been replaced is found out within an hour, at the price of one slower start."""

ONLY_FOR_THE_CAPTURE = ("release_s", "rehearsal_s", "release_again_s")
"""Phases of the child before the barrier that a cold start without a capture does not have."""

LONGEST_S = 86400.0
"""What took longer was not measured: the clock was set meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Slower:
    """Restores of a content take longer than a cold start. `last`: when the last one began (Unix seconds)."""

    why: str
    busy: bool
    last: float


def cold_s(files: Files) -> float | None:
    """Seconds that a cold start as the one that stands at the barrier now takes; None where that was not measured."""
    began, reached = files.at.get(START), files.at.get(READY)
    if files.ready is None or began is None or reached is None:
        return None
    return plausible(reached - began - _extra(files.ready.phases))


def _extra(phases: Mapping[str, float]) -> float:
    return sum(max(0.0, x) for x in map(phases.get, ONLY_FOR_THE_CAPTURE) if x is not None and math.isfinite(x))


def plausible(seconds: float) -> float | None:
    """The figure, if it can be one."""
    return round(seconds, 3) if 0 < seconds < LONGEST_S else None


def look(entry: Entry, cold: float | None) -> Slower | None:
    """Whether restores of this content take longer than a cold start; None also where too little is known."""
    times = [x.seconds for x in entry.attempts if x.outcome == "succeeded" and x.alone and x.seconds > 0][-SAMPLES:]
    if cold is None or cold <= 0 or len(times) < SAMPLES or min(times) <= max(cold * MARGIN, cold + LOSS_S):
        return None
    took = ", ".join(f"{x:.1f}" for x in times[:-1])
    return Slower(
        why=f"the last {len(times)} restores took {took} and {times[-1]:.1f} s until they served, a cold start {cold:.1f} s",
        busy=any(x.outcome == "pending" for x in entry.attempts),
        last=next((x.at for x in reversed(entry.attempts) if x.outcome != "pending"), 0.0),
    )


def declined(found: Slower | None, now: float) -> bool:
    """Whether a replica that could be restored starts cold instead. Not if it is time to look whether restores are quicker now.

    A clock that was set back makes it time, too: nothing waits longer than `PROBE_AFTER_S` by any one clock.
    """
    return found is not None and (found.busy or 0 <= now - found.last < PROBE_AFTER_S)
