"""What happens when in a chaos run: a pure function of the seed. The same seed gives the same actions at the same times, and a
longer run begins as a shorter one does.

Which pod or artifact an action meets is left open: `pick` says "the so-manieth part of those that are there". What is there depends
on how quick the machine is.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

SNAPSHOTS: Final = 2
MAX_REPLICAS: Final = 3
SIZES: Final = (2, 3, 4, 5)
"""Mebibytes of each kind of memory of an engine. Another size is another identity, and gives other answers."""
LEFT_BYTES: Final = (0, 4096, 1 << 20, 8 << 20)
"""What a filled disk has left: nothing, a page, enough for a small file, enough to begin a capture."""
PAUSE_S: Final = (1.5, 6.0)
"""Between the beginnings of two actions: shorter than a capture or a roll takes, so that they meet."""


class Kind(StrEnum):
    """What can be done to the system."""

    KILL_OPERATOR = "kill-operator"
    KILL_AGENT = "kill-agent"
    KILL_AGENT_CAPTURING = "kill-agent-capturing"
    KILL_AGENT_RESTORING = "kill-agent-restoring"
    DELETE_OPERATOR = "delete-operator"
    DELETE_AGENT = "delete-agent"
    KILL_ENGINE = "kill-engine"
    KILL_INIT = "kill-init"
    DELETE_POD = "delete-pod"
    DELETE_POD_NOW = "delete-pod-now"
    SCALE = "scale"
    NEW_IDENTITY = "new-identity"
    NEW_REVISION = "new-revision"
    RECAPTURE = "recapture"
    FILL_DISK = "fill-disk"
    FREE_DISK = "free-disk"
    CORRUPT_ARTIFACT = "corrupt-artifact"
    DELETE_CONTENT = "delete-content"
    RESTART_APISERVER = "restart-apiserver"
    RESTART_KUBELET = "restart-kubelet"
    FOREIGN_POD = "foreign-pod"
    REMOVE_FOREIGN_POD = "remove-foreign-pod"


UNDONE_BY: Final = {Kind.FILL_DISK: Kind.FREE_DISK, Kind.FOREIGN_POD: Kind.REMOVE_FOREIGN_POD}
"""What is done for a while: the other follows `seconds` later."""

DECK: Final = (
    *(kind for kind in Kind if kind not in UNDONE_BY.values()),
    *(Kind.SCALE, Kind.SCALE, Kind.KILL_ENGINE, Kind.KILL_INIT, Kind.DELETE_POD, Kind.NEW_REVISION),
)
"""One round: every kind at least once. Dealt in random order, then again."""


@dataclass(frozen=True)
class Action:
    """One thing to do."""

    number: int
    at: float
    """Seconds after the beginning."""
    kind: Kind
    snapshot: int = 0
    """Which snapshot it is about."""
    pick: float = 0.0
    """In [0, 1): which pod, artifact or byte."""
    value: int = 0
    """Replicas of SCALE, mebibytes of NEW_IDENTITY and KILL_AGENT_CAPTURING, free bytes of FILL_DISK."""
    seconds: float = 0.0
    """How long an outage lasts; how long after FILL_DISK and FOREIGN_POD they are undone."""

    def __str__(self) -> str:
        details = f"snapshot {self.snapshot}, pick {self.pick:.2f}, value {self.value}, {self.seconds:.1f} s"
        return f"{self.at:7.1f} #{self.number} {self.kind} ({details})"


def schedule(seed: int, seconds: float) -> list[Action]:
    """The actions of a run of this length, in order of time. Whatever is done for a while is undone within it."""
    return _undone(itertools.takewhile(lambda action: action.at <= seconds, _endless(seed)), seconds)


def one_round(seed: int, pace: float = 1.0) -> list[Action]:
    """The first round alone, every kind at least once, so many times as fast."""
    actions = _undone(itertools.islice(_endless(seed), len(DECK)))
    return [replace(action, at=round(action.at / pace, 1), seconds=round(action.seconds / pace, 1)) for action in actions]


def _undone(actions: Iterator[Action], end: float = math.inf) -> list[Action]:
    found = list(actions)
    for action in tuple(found):
        if action.kind in UNDONE_BY:
            at = round(min(action.at + action.seconds, end), 1)
            found.append(Action(action.number, at, UNDONE_BY[action.kind], action.snapshot))
    return sorted(found, key=lambda action: (action.at, action.number, action.kind in UNDONE_BY.values()))


def _endless(seed: int) -> Iterator[Action]:
    chance = random.Random(seed)
    at = 0.0
    deck: list[Kind] = []
    for number in itertools.count(1):
        if not deck:
            deck = chance.sample(DECK, len(DECK))
        kind = deck.pop()
        at += chance.uniform(*PAUSE_S)
        # Drawn for every kind, so that one kind's parameters do not shift those of what follows.
        snapshot, pick, seconds = chance.randrange(SNAPSHOTS), chance.random(), chance.uniform(4.0, 12.0)
        replicas, size, left = chance.randint(0, MAX_REPLICAS), chance.choice(SIZES), chance.choice(LEFT_BYTES)
        value = {
            Kind.SCALE: replicas,
            Kind.NEW_IDENTITY: size,
            Kind.KILL_AGENT_CAPTURING: size,
            Kind.FILL_DISK: left,
        }.get(kind, 0)
        yield Action(number, round(at, 1), kind, snapshot, pick, value, round(seconds, 1))
