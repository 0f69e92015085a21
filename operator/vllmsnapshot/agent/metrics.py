"""What an agent measures: decisions, starts, restores, captures and the state of its node. No series names a pod or a snapshot.

What a workload writes (names and durations of phases, reasons) becomes a label only where it is one of ours: otherwise a
container could make as many series as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric

from vllmsnapshot_child.protocol import Start

from ..api import constants as c
from ..api.types import Check, PodReport, VLLMSnapshotContentStatus, seconds
from ..eviction import Standing
from ..kube import Object
from ..metrics import Buckets, Common, Family, Once, State, known_reason
from ..objects import condition
from . import facts
from .space import Usage

REASON = "a reason of this project (docs/reference/conditions.md), or `Other`"
MODE = "`restore` or `cold`"

START_BUCKETS = Buckets(
    (1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
    "restored starts take 2 to 45 s from 0.1 to 72 billion parameters (this project's and other's measurements), cold ones 40 to "
    "300 s: both are resolved, so that their quotient can be told",
)
PHASE_BUCKETS = Buckets(
    (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
    "from a control file that is noticed (milliseconds) over CRIU and reloading weights (tenths to tens of seconds) to an engine "
    "that starts cold (minutes)",
)

DECISIONS = Family(
    name="vllmsnapshot_decisions_total",
    kind="counter",
    help="Decisions written to a container: what it shall do, and why.",
    labels={"mode": "`restore`, `cold` or `refuse`", "reason": REASON},
)
STARTS = Family(
    name="vllmsnapshot_starts_total",
    kind="counter",
    help='Containers that came to serve verified answers. With `mode="restore"` it is the proof that replicas are restored.',
    labels={"mode": MODE, "reason": f"why they started so: {REASON}"},
)
START_SECONDS = Family(
    name="vllmsnapshot_start_seconds",
    kind="histogram",
    help="Seconds from the creation of a pod until it served, for pods that came up at the first try.",
    labels={"mode": MODE},
    buckets=START_BUCKETS,
)
RESTART_SECONDS = Family(
    name="vllmsnapshot_restart_seconds",
    kind="histogram",
    help="Seconds from the last beginning in a container until it served, for pods in which an engine had crashed or a restore "
    "had failed before.",
    labels={"mode": MODE},
    buckets=START_BUCKETS,
)
START_PHASES = {
    "schedule": ("schedule_s", "pod creation to node"),
    "container": ("container_s", "node to the first process in the container"),
    "decide": ("decide_s", "until the agent has answered"),
    "queue": ("queue_s", "waiting for one of the node's restore slots"),
    "verify": ("verify_s", "comparing artifact and node"),
    "stage": ("stage_s", "copying the files that CRIU leaves out"),
    "criu": ("criu_s", "CRIU"),
    "accelerator": ("accelerator_s", "putting the GPU's memory back"),
    "engine": ("engine_s", "starting the engine (cold)"),
    "barrier": ("barrier_s", "at the barrier (cold), the freeze of the capture included"),
    "release": ("release_to_serving_s", "from the release until it serves: the next three, and waiting"),
    "reload": ("reload_s", "reading the weights again"),
    "canary": ("canary_after_s", "proving the answers"),
    "http": ("http_s", "the rest of the release: binding and starting the HTTP server"),
}
"""Label value to the key in a report, and its meaning. `http_s` is computed here."""

START_PHASE_SECONDS = Family(
    name="vllmsnapshot_start_phase_seconds",
    kind="histogram",
    help="Seconds by phase of containers that came to serve.",
    labels={"mode": MODE, "phase": "; ".join(f"`{name}`: {what}" for name, (_, what) in START_PHASES.items())},
    buckets=PHASE_BUCKETS,
)
RESTORES = Family(
    name="vllmsnapshot_restores_total",
    kind="counter",
    help="Restores that ended: each once, when the ledger of the node records it.",
    labels={
        "result": "`succeeded`: it serves; `failed`; `aborted`: nobody's failure (pod deleted, agent restarted)",
        "reason": REASON,
    },
)
CAPTURES = Family(
    name="vllmsnapshot_captures_total",
    kind="counter",
    help="Capture orders that were answered: each once, when the content's status tells it.",
    labels={"result": "`succeeded` or `failed`", "reason": REASON},
)
CAPTURE_PHASES = {
    "preflight": "looking for what cannot be captured",
    "accelerator": "saving the GPU's memory to the process",
    "criu": "CRIU",
    "copy": "copying what CRIU leaves out",
    "freeze": "the processes stood still",
    "digest": "digests, while the replica serves already",
    "total": "until the artifact was durable",
}
CAPTURE_PHASE_SECONDS = Family(
    name="vllmsnapshot_capture_phase_seconds",
    kind="histogram",
    help="Seconds by phase of captures that succeeded.",
    labels={"phase": "; ".join(f"`{name}`: {what}" for name, what in CAPTURE_PHASES.items())},
    buckets=PHASE_BUCKETS,
)
ARTIFACT_BYTES = Family(
    name="vllmsnapshot_artifact_bytes",
    kind="histogram",
    help="Sizes of captured artifacts in bytes.",
    labels={},
    buckets=Buckets(
        tuple(float(1 << power) for power in range(28, 38)),
        "without weights an artifact is the memory of the process, 1 GiB and more, and of a GPU what is not weights or KV cache; with "
        "everything it is as large as the GPU's memory: powers of two from 256 MiB to 128 GiB",
    ),
)
IN_FLIGHT = Family(
    name="vllmsnapshot_agent_restores_in_flight",
    kind="gauge",
    help="Restores that are being done now.",
    labels={},
)
HELD = Family(
    name="vllmsnapshot_agent_artifacts",
    kind="gauge",
    help="Artifacts in the node's store, by state.",
    labels={"state": "`usable`, `quarantined`, or `slower` than a cold start"},
)
STORE_USED = Family(
    name="vllmsnapshot_agent_store_used_bytes",
    kind="gauge",
    help="Bytes of the artifacts in the node's store.",
    labels={},
)
STORE_FREE = Family(
    name="vllmsnapshot_agent_store_free_bytes",
    kind="gauge",
    help="Bytes that are free on the disk of the store.",
    labels={},
)
STORE_QUOTA = Family(
    name="vllmsnapshot_agent_store_quota_bytes",
    kind="gauge",
    help="Bytes that the artifacts in the node's store may take; `+Inf` where there is no quota.",
    labels={},
)
STORE_ROOM = Family(
    name="vllmsnapshot_agent_store_room_bytes",
    kind="gauge",
    help="Bytes that the next capture on the node could have: what quota and disk leave, and what would be evicted for it.",
    labels={},
)
EVICTIONS = Family(
    name="vllmsnapshot_evictions_total",
    kind="counter",
    help="Artifacts that were removed because the node's store was full.",
    labels={
        "standing": "`broken`: nothing may be restored from it; `superseded`: its snapshot has a later one; `idle`: no replica of "
        "its identity was on the node. Many idle ones: the store is too small for what takes turns on the node"
    },
)
STORE_LARGEST = Family(
    name="vllmsnapshot_agent_store_largest_artifact_bytes",
    kind="gauge",
    help="Bytes of the largest artifact in the node's store: the next capture may need as much.",
    labels={},
)
CAPABLE = Family(
    name="vllmsnapshot_agent_node_capable",
    kind="gauge",
    help="1 if the node can capture and restore, else 0.",
    labels={},
)
CHECK = Family(
    name="vllmsnapshot_agent_node_check",
    kind="gauge",
    help="Checks of the node: 1 passed, 0.5 passed with a warning, 0 failed.",
    labels={"check": "name of the check, as in the status of the VLLMSnapshotNode"},
)
OUTBOX = Family(
    name="vllmsnapshot_agent_outbox_depth",
    kind="gauge",
    help="Reports and events that are not on record with the API server yet.",
    labels={},
)

FAMILIES = (
    DECISIONS,
    STARTS,
    START_SECONDS,
    RESTART_SECONDS,
    START_PHASE_SECONDS,
    RESTORES,
    CAPTURES,
    CAPTURE_PHASE_SECONDS,
    ARTIFACT_BYTES,
    IN_FLIGHT,
    HELD,
    STORE_USED,
    STORE_FREE,
    STORE_QUOTA,
    STORE_ROOM,
    STORE_LARGEST,
    EVICTIONS,
    CAPABLE,
    CHECK,
    OUTBOX,
)

# A counter that appears with its first event has no increase by it: Prometheus compares with the sample before. So the series of
# what rarely happens and is alerted on or drawn are there, at 0, from the start.
_R = c.Reason
EXPECTED_STARTS = (
    (c.START_RESTORE, _R.RESTORED),
    *(
        (c.START_COLD, reason)
        for reason in (
            _R.NO_ARTIFACT,
            _R.CAPTURE_IN_PROGRESS,
            _R.IDENTITY_MISMATCH,
            _R.ARTIFACT_QUARANTINED,
            _R.RECAPTURE,
            _R.RESTORE_SLOWER,
            _R.RESTORE_FAILED,
            _R.RESTORE_TIMEOUT,
            _R.RESTORE_DIED,
            _R.UNATTENDED,
        )
    ),
)
EXPECTED_RESTORES = (
    ("succeeded", _R.RESTORED),
    ("aborted", _R.AGENT_RESTARTED),
    ("aborted", _R.SOURCE_GONE),
    *(
        ("failed", reason)
        for reason in (
            _R.RESTORE_FAILED,
            _R.RESTORE_TIMEOUT,
            _R.RESTORE_DIED,
            _R.CANARY_MISMATCH,
            _R.ENGINE_FAILED,
            _R.IDENTITY_MISMATCH,
            _R.ARTIFACT_MISSING,
            _R.ARTIFACT_CORRUPT,
            _R.INSUFFICIENT_MEMORY,
            _R.INSUFFICIENT_DISK,
            _R.GPU_RESTORE_FAILED,
            _R.GPU_OUT_OF_MEMORY,
        )
    ),
)
EXPECTED_CAPTURES = (
    ("succeeded", _R.CAPTURED),
    *(
        ("failed", reason)
        for reason in (
            _R.DUMP_FAILED,
            _R.CAPTURE_TIMEOUT,
            _R.STORE_FAILED,
            _R.INSUFFICIENT_DISK,
            _R.PREFLIGHT_INET_SOCKET,
            _R.PREFLIGHT_ABSTRACT_SOCKET,
            _R.PREFLIGHT_IO_URING,
            _R.PREFLIGHT_SESSION,
            _R.PREFLIGHT_SIZE,
            _R.AGENT_RESTARTED,
            _R.GPU_CHECKPOINT_FAILED,
        )
    ),
)
_OF_ONE_MODE = {
    c.START_COLD: {"engine", "barrier"},
    c.START_RESTORE: {"queue", "verify", "stage", "criu", "accelerator"},
}
EXPECTED_PHASES = tuple(
    (mode, phase)
    for mode, other in ((c.START_COLD, c.START_RESTORE), (c.START_RESTORE, c.START_COLD))
    for phase in START_PHASES
    if phase not in _OF_ONE_MODE[other]
)

SERVING = "Serving"
_CHECK_VALUES = {"Pass": 1.0, "Warn": 0.5, "Fail": 0.0}


class Metrics(Common):
    """An agent's registry. Its methods may be called from any thread."""

    def __init__(self) -> None:
        super().__init__("agent")
        self._decisions = DECISIONS.counter(self.registry)
        self._starts = STARTS.counter(self.registry)
        self._start_seconds = START_SECONDS.histogram(self.registry)
        self._restart_seconds = RESTART_SECONDS.histogram(self.registry)
        self._start_phases = START_PHASE_SECONDS.histogram(self.registry)
        self._restores = RESTORES.counter(self.registry)
        self._captures = CAPTURES.counter(self.registry)
        self._capture_phases = CAPTURE_PHASE_SECONDS.histogram(self.registry)
        self._evictions = EVICTIONS.counter(self.registry)
        self._bytes = ARTIFACT_BYTES.histogram(self.registry)
        for labels in EXPECTED_STARTS:
            self._decisions.labels(*labels)
            self._starts.labels(*labels)
        for labels in EXPECTED_RESTORES:
            self._restores.labels(*labels)
        for labels in EXPECTED_CAPTURES:
            self._captures.labels(*labels)
        for standing in Standing:
            if standing is not Standing.NEEDED:
                self._evictions.labels(standing.name.lower())
        for mode in (c.START_COLD, c.START_RESTORE):
            self._start_seconds.labels(mode)
            self._restart_seconds.labels(mode)
        for labels in EXPECTED_PHASES:
            self._start_phases.labels(*labels)
        for phase in CAPTURE_PHASES:
            self._capture_phases.labels(phase)
        self._served = Once()
        self._answered = Once()

    def show(self, state: Callable[[], Iterable[Metric]]) -> None:
        """Expose these gauges too."""
        self.registry.register(State(state))

    # --- what happened ---

    def decided(self, start: Start) -> None:
        """This decision was written."""
        self._decisions.labels(start.mode, known_reason(start.reason)).inc()

    def settled(self, outcome: str, reason: str) -> None:
        """The ledger has recorded how a restore ended."""
        self._restores.labels(outcome, c.Reason.RESTORED if outcome == "succeeded" else known_reason(reason)).inc()

    def evicted(self, standing: Standing) -> None:
        """An artifact was removed from a full store."""
        self._evictions.labels(standing.name.lower()).inc()

    def will_report(self, uid: str, before: PodReport, report: PodReport) -> None:
        """`report` is about to be written to the pod, which has `before`."""
        if report.state == SERVING and (before.state, before.incarnation) != (SERVING, report.incarnation):
            self._served.expect(uid, report.incarnation)

    def reported(self, pod: Object) -> None:
        """The pod as it is on record now."""
        report = facts.report_of(pod)
        if report.state != SERVING or not self._served.confirm(str(pod["metadata"]["uid"]), report.incarnation):
            return
        if report.start not in (c.START_COLD, c.START_RESTORE):
            return
        self._starts.labels(report.start, known_reason(report.reason)).inc()
        total = report.phases.get("total_s")
        if total is not None:
            (self._restart_seconds if report.restarts else self._start_seconds).labels(report.start).observe(total)
        for name, value in start_phases(report.phases):
            self._start_phases.labels(report.start, name).observe(value)

    def will_answer(self, name: str, content: Object, status: VLLMSnapshotContentStatus) -> None:
        """`status` is about to be written to the content."""
        if not answer(facts.content_status(content)) and (token := answer(status)):
            self._answered.expect(name, token)

    def answered(self, content: Object) -> None:
        """The content as it is on record now."""
        status = facts.content_status(content)
        if not self._answered.confirm(str(content["metadata"]["name"]), answer(status)):
            return
        if (failed := condition(content, c.FAILED)).get("status") == "True":
            self._captures.labels("failed", known_reason(str(failed.get("reason")))).inc()
            return
        self._captures.labels("succeeded", c.Reason.CAPTURED).inc()
        if status.artifact is not None:
            self._bytes.observe(status.artifact.bytes)
        for name, text in (status.phases or {}).items():
            if name in CAPTURE_PHASES:
                self._capture_phases.labels(name).observe(seconds(text))

    def forget(self, key: str) -> None:
        """A pod (by UID) or a content (by name) is gone."""
        self._served.forget(key)
        self._answered.forget(key)


def answer(status: VLLMSnapshotContentStatus) -> str:
    """Which of Captured and Failed a content's status says; empty while it says neither."""
    return next((x.type for x in status.conditions or () if x.type in (c.CAPTURED, c.FAILED) and x.status == "True"), "")


def start_phases(phases: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """What of a report is observed: phase and seconds."""
    found = dict(phases)
    release = found.get("release_to_serving_s")
    if release is not None:
        found["http_s"] = release - sum(found.get(key, 0.0) for key in ("renew_s", "reload_s", "canary_after_s"))
    for name, (key, _) in START_PHASES.items():
        value = found.get(key)
        if value is not None and math.isfinite(value):
            yield name, max(0.0, value)


def node_state(
    *,
    in_flight: int,
    artifacts: Mapping[str, int],
    quarantined: Iterable[str],
    slower: Iterable[str],
    capable: bool,
    usage: Usage,
    room: int,
    checks: Iterable[Check],
    outbox: int,
) -> Iterator[Metric]:
    """The gauges of a node. `artifacts` is bytes by content, `quarantined` and `slower` names of contents, `room` bytes."""
    bad = artifacts.keys() & set(quarantined)
    slow = (artifacts.keys() & set(slower)) - bad
    yield IN_FLIGHT.now([((), in_flight)])
    usable = len(artifacts) - len(bad) - len(slow)
    yield HELD.now([(("usable",), usable), (("quarantined",), len(bad)), (("slower",), len(slow))])
    yield STORE_USED.now([((), sum(artifacts.values()))])
    yield STORE_FREE.now([((), usage.free)])
    yield STORE_QUOTA.now([((), math.inf if usage.quota is None else usage.quota)])
    yield STORE_ROOM.now([((), room)])
    yield STORE_LARGEST.now([((), max(artifacts.values(), default=0))])
    yield CAPABLE.now([((), float(capable))])
    yield CHECK.now(((check.name,), _CHECK_VALUES[check.status]) for check in checks)
    yield OUTBOX.now([((), outbox)])
