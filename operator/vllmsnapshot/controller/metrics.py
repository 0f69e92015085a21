"""What the operator measures: its queue, and the state of every VLLMSnapshot as its last pass saw it.

Only here a series carries the name of a snapshot. Its series go with it: what is exposed is what the last passes left in memory,
and a snapshot that is gone is dropped from there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from ..api import constants as c
from ..api.types import VLLMSnapshotStatus, seconds
from ..metrics import Buckets, Common, Family, State
from ..world import Claim, Content, Observed
from .observe import Key
from .workqueue import WorkQueue

SNAPSHOT = {"namespace": "namespace of the VLLMSnapshot", "snapshot": "its name"}

QUEUE_DEPTH = Family(
    name="vllmsnapshot_workqueue_depth",
    kind="gauge",
    help="Snapshots that are due now and wait for a worker.",
    labels={},
)
QUEUE_OLDEST = Family(
    name="vllmsnapshot_workqueue_oldest_seconds",
    kind="gauge",
    help="Seconds for which the longest-running pass has run, or the longest-due one has waited.",
    labels={},
)
RESYNC_AGE = Family(
    name="vllmsnapshot_operator_resync_age_seconds",
    kind="gauge",
    help="Seconds since all snapshots were last listed and queued.",
    labels={},
)
WANTED = Family(
    name="vllmsnapshot_snapshot_replicas_wanted",
    kind="gauge",
    help="spec.replicas.",
    labels=SNAPSHOT,
)
REPLICAS = Family(
    name="vllmsnapshot_snapshot_replicas",
    kind="gauge",
    help="Replicas that are there, by how they started.",
    labels={**SNAPSHOT, "start_mode": "`restore`, `cold`, or `undecided` while nothing has been reported"},
)
REPLICAS_READY = Family(
    name="vllmsnapshot_snapshot_replicas_ready",
    kind="gauge",
    help="Replicas that serve verified answers.",
    labels=SNAPSHOT,
)
CONDITION = Family(
    name="vllmsnapshot_snapshot_condition",
    kind="gauge",
    help="1 if the condition is True, else 0. One series per condition: the present reason's.",
    labels={**SNAPSHOT, "condition": "type of the condition", "reason": "its present reason"},
)
ARTIFACTS = Family(
    name="vllmsnapshot_snapshot_artifacts",
    kind="gauge",
    help="Contents of all identities and nodes, by state.",
    labels={
        **SNAPSHOT,
        "state": "`usable`; `slower` than a cold start, so not used; `ordered`: not captured yet; `failed`; `quarantined`: the breaker is open, nothing is restored from it; "
        "`unusable`: captured, but its node has changed or gone, or it is being deleted",
    },
)
ARTIFACT_BYTES = Family(
    name="vllmsnapshot_snapshot_artifact_bytes",
    kind="gauge",
    help="Bytes of all captured artifacts of the snapshot, on all nodes.",
    labels=SNAPSHOT,
)
RESTORE_FAILURES = Family(
    name="vllmsnapshot_snapshot_consecutive_restore_failures",
    kind="gauge",
    help="Failed restores in a row of the artifact that has the most. At restore.failureBudget its breaker opens.",
    labels=SNAPSHOT,
)
LAST_START = Family(
    name="vllmsnapshot_snapshot_last_start_seconds",
    kind="gauge",
    help="Seconds from pod creation to serving, of the newest replica of each kind (status.timings).",
    labels={**SNAPSHOT, "start_mode": "`restore` or `cold`"},
)
FROM_ZERO = Family(
    name="vllmsnapshot_scale_from_zero_seconds",
    kind="histogram",
    help="Seconds from the first pass that saw a snapshot scaled up from 0 replicas to a ready replica. A scale-up that spans a "
    "restart of the operator is not observed.",
    labels={},
    buckets=Buckets(
        (1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0),
        "a restored start takes 2 to 45 s from 0.1 to 72 billion parameters, a cold one up to minutes",
    ),
)

FAMILIES = (
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    RESYNC_AGE,
    WANTED,
    REPLICAS,
    REPLICAS_READY,
    CONDITION,
    ARTIFACTS,
    ARTIFACT_BYTES,
    RESTORE_FAILURES,
    LAST_START,
    FROM_ZERO,
)

STATES = ("usable", "slower", "ordered", "failed", "quarantined", "unusable")
MODES = (c.START_RESTORE, c.START_COLD, "undecided")


@dataclass(frozen=True)
class Seen:
    """A snapshot as the last pass left it."""

    wanted: int
    status: VLLMSnapshotStatus
    artifacts: Counter[str]
    bytes: int
    failures: int


class Metrics(Common):
    """The operator's registry. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("operator")
        self._clock = clock
        self._seen: dict[Key, Seen] = {}
        self._woken: dict[Key, float] = {}
        self._from_zero = FROM_ZERO.histogram(self.registry)
        self.registry.register(State(self._state))

    def watch(self, queue: WorkQueue[Key], resync_age: Callable[[], float]) -> None:
        """Show the state of the queue and of the resync too."""

        def look() -> Iterator[Metric]:
            yield QUEUE_DEPTH.now([((), queue.depth)])
            yield QUEUE_OLDEST.now([((), queue.stuck_s())])
            yield RESYNC_AGE.now([((), resync_age())])

        self.registry.register(State(look))

    def saw(self, claim: Claim, observed: Observed, status: VLLMSnapshotStatus) -> None:
        """A pass has computed this status."""
        key = (claim.namespace, claim.name)
        wanted = claim.spec.replicas if claim.spec is not None else 0
        states = Counter(_state(observed, content) for content in observed.contents)
        self._seen[key] = Seen(
            wanted=wanted,
            status=status,
            artifacts=states,
            bytes=sum(x.status.artifact.bytes for x in observed.contents if x.captured and x.status.artifact),
            failures=max((x.status.restores.consecutive_failures for x in observed.contents if x.status.restores), default=0),
        )
        asleep = any(x.type == c.READY and x.reason == c.Reason.SCALED_TO_ZERO for x in claim.conditions)
        if wanted == 0:
            self._woken.pop(key, None)
        elif asleep:
            self._woken.setdefault(key, self._clock())
        if status.ready_replicas and key in self._woken:
            self._from_zero.observe(self._clock() - self._woken.pop(key))

    def keep(self, keys: Iterable[Key]) -> None:
        """These are all snapshots that exist."""
        gone = self._seen.keys() - set(keys)
        for key in gone:
            self.gone(key)

    def gone(self, key: Key) -> None:
        """The snapshot does not exist any more."""
        self._seen.pop(key, None)
        self._woken.pop(key, None)

    def _state(self) -> Iterator[Metric]:
        seen = self._seen
        yield WANTED.now((key, x.wanted) for key, x in seen.items())
        yield REPLICAS.now(
            ((*key, mode), number) for key, x in seen.items() for mode, number in zip(MODES, _by_mode(x.status), strict=True)
        )
        yield REPLICAS_READY.now((key, x.status.ready_replicas) for key, x in seen.items())
        yield CONDITION.now(
            ((*key, item.type, item.reason), float(item.status == "True"))
            for key, x in seen.items()
            for item in x.status.conditions or ()
        )
        yield ARTIFACTS.now(((*key, state), x.artifacts[state]) for key, x in seen.items() for state in STATES)
        yield ARTIFACT_BYTES.now((key, x.bytes) for key, x in seen.items())
        yield RESTORE_FAILURES.now((key, x.failures) for key, x in seen.items())
        yield LAST_START.now(((*key, mode), value) for key, x in seen.items() for mode, value in _last_starts(x.status))


def _state(observed: Observed, content: Content) -> str:
    """The state of a content, one of STATES."""
    if content.quarantined:
        return "quarantined"
    if content.failed:
        return "failed"
    if content.pending:
        return "ordered"
    if not observed.usable(content):
        return "unusable"
    return "slower" if content.slower else "usable"


def _by_mode(status: VLLMSnapshotStatus) -> tuple[int, int, int]:
    """Replicas in the order of MODES."""
    restored, cold = status.restored_replicas, status.cold_replicas
    return restored, cold, max(0, status.replicas - restored - cold)


def _last_starts(status: VLLMSnapshotStatus) -> Iterator[tuple[str, float]]:
    if status.timings is not None:
        for mode, text in ((c.START_RESTORE, status.timings.restored_start), (c.START_COLD, status.timings.cold_start)):
            if text is not None:
                yield mode, seconds(text)
