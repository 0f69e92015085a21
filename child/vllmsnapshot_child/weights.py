"""Whether the weights go into the image. The snapshot says so (`capture.weights`); for `Auto` the rule is here. Pure.

Left out, they are read from the model again after every restore. Kept, every restore has more to read, and nobody has to read
and process them again. Which is quicker depends on the model's volume, on the store's disk and on the model, so `Auto` takes
neither for granted: it compares what was measured in this process with what was measured on this node.
"""

from __future__ import annotations

import os
from typing import NamedTuple

DISCARD, KEEP, AUTO = "Discard", "Keep", "Auto"
POLICIES = (DISCARD, KEEP, AUTO)

POLICY = "VLLMSNAPSHOT_WEIGHTS"
"""Environment variable with one of POLICIES."""

MARGIN = 0.8
"""Kept weights must take at most this part of the time of a reload: they also cost space, and a longer capture."""

ROOM_MARGIN = 256 << 20
"""Bytes of the memory limit to leave free beside weights that come from a device (page tables, the copy's own buffers)."""


class Facts(NamedTuple):
    """What was measured when the decision is due."""

    bytes: int = 0
    """What the image is smaller by without the weights."""
    reload_s: float = 0.0
    """Seconds that reading them again took in the rehearsal."""
    restore_bytes_per_s: int | None = None
    """What restores on this node moved, from the agent; None if there was none yet."""
    room: int | None = None
    """Bytes that the container's memory limit leaves for weights that are on a device now; None: no matter, or no limit."""
    fixed: str = ""
    """Why they cannot be left out, whatever is wanted; empty if they can."""


class Choice(NamedTuple):
    """DISCARD or KEEP, and the reason in words."""

    weights: str
    why: str


def policy() -> str:
    """What the pod's environment asks for. An unknown word is the default: a newer operator must not keep a replica down."""
    word = os.environ.get(POLICY, "")
    return word if word in POLICIES else DISCARD


def decide(wanted: str, facts: Facts) -> Choice:
    """The rule: keep the weights if that makes a restore quicker, by what was measured, and if they fit."""
    if facts.fixed:
        return Choice(KEEP, facts.fixed)
    if wanted != AUTO:
        return Choice(wanted, f"capture.weights is {wanted}")
    size = f"{facts.bytes / 1e6:.0f} MB"
    if not facts.restore_bytes_per_s:
        return Choice(DISCARD, f"no restore was measured on this node yet; reading {size} again took {facts.reload_s:.2f} s")
    with_image_s = facts.bytes / facts.restore_bytes_per_s
    measured = (
        f"reading {size} again took {facts.reload_s:.2f} s in the rehearsal; in the image they take {with_image_s:.2f} s "
        f"at {facts.restore_bytes_per_s / 1e6:.0f} MB/s, as restores on this node did"
    )
    if with_image_s > MARGIN * facts.reload_s:
        return Choice(DISCARD, measured)
    if facts.room is not None and facts.bytes + ROOM_MARGIN > facts.room:
        return Choice(DISCARD, f"{measured}; but the container's memory limit leaves {max(0, facts.room) / 1e6:.0f} MB for them")
    return Choice(KEEP, measured)
