"""What to do next in one pod: `next_step` is a pure function of all that can be seen of it. `pods.py` sees and does.

It is asked only while nobody works on the pod, so work that has begun and is not finished is work that an agent before us left:
that is how a restart of the agent is recovered from, and nothing has to be remembered but files and the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllmsnapshot_child.protocol import ENDING, HELLO, PROTOCOL_VERSION, READY, SERVING, START, Oracle, Start
from vllmsnapshot_child.protocol import Reason as ChildReason
from vllmsnapshot_child.protocol import Release as ReleaseMarker

from ..api.constants import DISCARD, ENV_PORT, Reason
from ..api.types import PodSettings, RestorePolicy, Toggle
from .breakeven import Slower, declined, plausible
from .control import Files
from .ledger import Attempt, Outcome
from .nodeops import PodRef

ORDER_GRACE_S = 5.0
"""How long a server at the barrier waits for the order to capture it. The operator writes it when the pod is scheduled."""

ANSWER_MARGIN_S = 1.5
"""The decision must be written this much before init stops waiting: two sides that disagree start two engines in one pod."""

MAX_RESTORES = 3
"""Init stops asking after so many failed restores in one container."""

TRUST_AFTER_S = 10.0
"""How long the kubelet must have called a server healthy before it is believed without a serving.json."""

INIT_DECISION_TIMEOUT_S = 10.0
"""Init's own default (VLLMSNAPSHOT_DECISION_TIMEOUT_S)."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The facts of a replica that decisions rest on, out of its API object (see `facts.py`)."""

    ref: PodRef
    snapshot: str  # name and UID of the VLLMSnapshot that controls it
    snapshot_uid: str
    identity: str
    settings: PodSettings
    port: int
    host: str | None = None
    address: str = ""  # where it serves, for asking a foreign server
    env: Mapping[str, str] = field(default_factory=dict)  # what is this pod's own, for a restored process
    deleting: bool = False
    finished: bool = False
    foreign: bool = False  # the server is vLLM's own snapshot child
    gpu: bool = False  # asks for a GPU
    host_network: bool = False
    decision_timeout_s: float = INIT_DECISION_TIMEOUT_S
    created: float = 0.0
    scheduled: float | None = None
    healthy_since: float | None = None  # the kubelet's probes pass, by its own word (ContainersReady)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A content on this node, as the API, the ledger and the store together describe it."""

    name: str
    uid: str
    namespace: str
    snapshot_uid: str
    identity: str
    node: str
    source_uid: str
    captured: bool = False
    failed: bool = False
    quarantined: str = ""
    deleting: bool = False
    present: bool = False  # its files are in the store, complete
    stale: str = ""  # the fact of the node that is not what it was at the capture
    capture_failed: bool = False  # noted in the ledger, perhaps not yet in the status
    foreign: bool = False
    captured_at: str = ""
    oracle: Oracle | None = None
    slower: Slower | None = None  # than a cold start

    @property
    def open(self) -> bool:
        """An order that nobody has answered yet."""
        return not (self.captured or self.failed or self.deleting or self.present or self.capture_failed)

    def belongs(self, pod: Pod, node: str) -> bool:
        """Whether it is an artifact of this very snapshot, identity and node. Labels can be forged; UID and namespace bind it."""
        return (
            bool(pod.identity)
            and self.snapshot_uid == pod.snapshot_uid
            and self.namespace == pod.ref.namespace
            and self.identity == pod.identity
            and self.node == node
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything `next_step` and the report look at, at one moment `now` (Unix seconds)."""

    now: float
    node: str
    pod: Pod
    files: Files
    candidates: tuple[Candidate, ...] = ()
    capable: bool = True
    incapable: str = ""
    attempts: tuple[tuple[str, Attempt], ...] = ()  # of this pod, from the ledger: content and attempt
    blocked: Mapping[str, str] = field(default_factory=dict)
    ages: Mapping[str, float] = field(default_factory=dict)
    """Seconds since each control file was written, by a clock that nobody sets (see `ages.py`)."""
    restore_bytes_per_s: int | None = None  # of this node, from the ledger

    def attempt(self) -> tuple[str, Attempt] | None:
        """The restore of the present incarnation, if one was begun."""
        word = self.files.incarnation
        return next(((n, a) for n, a in self.attempts if a.incarnation == word), None)

    def candidate(self, name: str | None) -> Candidate | None:
        """The content of that name, if it is this pod's business.

        Names come out of the control volume, where the workload writes too: one that names the artifact of somebody else must
        neither learn its answer nor get it condemned.
        """
        for x in self.candidates:
            if x.name == name and (x.belongs(self.pod, self.node) or x.source_uid == self.pod.ref.uid):
                return x
        return None

    def order(self) -> Candidate | None:
        """The open order to capture this pod."""
        return next((x for x in self.candidates if x.source_uid == self.pod.ref.uid and x.open), None)

    def age(self, name: str) -> float:
        """Seconds since that control file was written."""
        return self.ages.get(name, max(0.0, self.now - self.files.at.get(name, self.now)))


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do until something changes, or until the time `until` (Unix seconds)."""

    why: str
    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Write the first decision of this incarnation."""

    start: Start


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Bring the content up, within the time limit; needs one of the node's slots."""

    content: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class GiveUpRestore:
    """Clear the container and write another decision."""

    start: Start


@dataclass(frozen=True, kw_only=True)
class Settle:
    """Record how a restore ended."""

    content: str
    incarnation: str
    outcome: Outcome
    reason: str = ""
    message: str = ""
    seconds: float = 0.0  # from its beginning until the replica served


@dataclass(frozen=True, kw_only=True)
class Release:
    """Let the server leave the barrier. `resume`: it may still be stopped by a capture that nobody finishes any more."""

    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Fulfil the order."""

    content: str


@dataclass(frozen=True, kw_only=True)
class FailOrder:
    """Note that the order cannot be fulfilled."""

    content: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Ask a foreign server over HTTP, since it writes no serving.json."""

    expected: Oracle | None


@dataclass(frozen=True, kw_only=True)
class Condemn:
    """A wrong answer: quarantine the contents, then end the container, so that it comes back another way."""

    contents: tuple[str, ...]
    message: str


@dataclass(frozen=True, kw_only=True)
class End:
    """The server is done and waits for it: let go of the GPU, then kill it, within so many seconds."""

    timeout_s: float


Step = Wait | Answer | Restore | GiveUpRestore | Settle | Release | Capture | FailOrder | Probe | Condemn | End


def marker(v: View, *, moved: bool, gpu_fine: bool) -> ReleaseMarker:
    """What lets the server leave its barrier, as its pod wants it.

    `moved`: the engine's state on a GPU, if it has one, was put back by the driver; then its end is ours to attend, where replicas
    with a GPU can be captured and restored at all (`gpu_fine`).
    """
    return ReleaseMarker(
        incarnation=v.files.incarnation,
        host=v.pod.host,
        port=v.pod.port,
        env={**v.pod.env, ENV_PORT: str(v.pod.port)},
        # vLLM's own server knows nothing of it.
        attend_end=moved and v.pod.gpu and gpu_fine and not foreign(v),
    )


# --- the decision ----------------------------------------------------------------------------------------------------


def next_step(v: View) -> Step:
    """The next idempotent step. Total: every view has one."""
    if v.files.ending is not None and v.files.hello is not None:
        # Also of a pod that is not deleted: the kubelet restarts containers too.
        left = v.files.ending.timeout_s - v.age(ENDING)
        if left > 0:
            return End(timeout_s=left)
    if v.pod.deleting:
        if undecided(v):
            # Its PID 1 was told to end before it could hear that (docs/child.md), and nobody tells it again.
            return Answer(start=_start(v, "refuse", Reason.POD_DELETED, "the pod is being deleted"))
        return Wait(why="terminating")
    if v.pod.finished:
        return _fail_order(v, Reason.SOURCE_GONE, "the pod has ended") or Wait(why="ended")
    if v.files.hello is None:
        return Wait(why="no container has said hello")
    lost = _lost_restore(v)
    if lost is not None:
        return lost
    if undecided(v):
        return Answer(start=choose(v))
    start = v.files.start
    if start is None and v.files.serving is None and v.files.ready is None:
        return _fail_order(v, Reason.SOURCE_RELEASED, "started without the agent, so without a barrier") or Wait(why="unattended")
    if start is not None and start.mode == "refuse":
        return Wait(why="refused")
    if restoring(v):
        return _restore_step(v)
    if v.files.restored is not None and v.files.release is None:
        return Release()
    if v.files.serving is not None:
        return _serving_step(v)
    if v.files.ready is not None and v.files.release is None:
        return _barrier_step(v)
    if v.files.release is not None:
        return _released_step(v)
    if start is not None and start.mode == "cold" and not start.attended:
        why = f"{start.reason}: {start.message}" if start.message else start.reason
        failed = _fail_order(v, Reason.SOURCE_RELEASED, f"starts without a barrier: {why}")
        if failed is not None:
            return failed
    return Wait(why="starting")


def undecided(v: View) -> bool:
    """Whether init waits for a decision, and long enough to get it."""
    f = v.files
    return (
        f.hello is not None
        and f.start is None
        and f.serving is None
        and f.ready is None
        and v.age(HELLO) < v.pod.decision_timeout_s - ANSWER_MARGIN_S
    )


def restoring(v: View) -> bool:
    """Whether the pod waits for a tree: decided, not there yet, and init has not given up waiting."""
    start, f = v.files.start, v.files
    return (
        start is not None
        and start.mode == "restore"
        and f.restored is None
        and f.serving is None
        and f.ready is None
        and v.age(START) < start.timeout_s
    )


def _lost_restore(v: View) -> Step | None:
    """A restore that is still pending in the ledger although its incarnation is over, or is no longer waited for."""
    assert v.files.hello is not None
    for content, attempt in v.attempts:
        if attempt.outcome != "pending":
            continue
        if attempt.incarnation != v.files.incarnation:
            why = v.files.hello.failed_restores.get(content)
            reason, message = _died(why) if why else (Reason.RESTORE_DIED, "the container ended before it served")
            # A port that somebody else has says nothing about the artifact.
            outcome: Outcome = "aborted" if why and why.startswith(ChildReason.BIND_FAILED) else "failed"
            return Settle(content=content, incarnation=attempt.incarnation, outcome=outcome, reason=reason, message=message)
        if v.files.restored is None and not restoring(v):
            message = "init stopped waiting for the restore"
            return Settle(
                content=content, incarnation=attempt.incarnation, outcome="failed", reason=Reason.RESTORE_TIMEOUT, message=message
            )
    return None


def _died(why: str) -> tuple[str, str]:
    """Reason and message of what init says about a failed restore (`Word: text`); only words that mean something to us count."""
    word, _, text = why.partition(":")
    known = {
        Reason.CANARY_MISMATCH: Reason.CANARY_MISMATCH,
        "NotServing": Reason.RESTORE_TIMEOUT,
        Reason.RESTORE_TIMEOUT: Reason.RESTORE_TIMEOUT,
    }
    return known.get(word, Reason.RESTORE_DIED), (text.strip() if word in known else why)[:1000]


def _restore_step(v: View) -> Step:
    start = v.files.start
    assert start is not None
    found = v.attempt()
    if found is not None:
        _, attempt = found
        if attempt.outcome == "pending":
            return Settle(
                content=found[0],
                incarnation=attempt.incarnation,
                outcome="aborted",
                reason=Reason.AGENT_RESTARTED,
                message="the agent was restarted during the restore",
            )
        return _give_up(v, attempt.reason or Reason.RESTORE_FAILED, attempt.message)
    content = v.candidate(start.content)
    if content is None or not content.belongs(v.pod, v.node):
        return _give_up(v, Reason.ARTIFACT_MISSING, "the content was deleted")
    unusable = _unusable(v, content)
    if unusable is not None:
        return _give_up(v, *unusable)
    # Init waits `timeout_s` for the tree and then starts cold by itself: our limit must be over well before.
    left = start.timeout_s - v.age(START) - min(5.0, 0.2 * start.timeout_s)
    if left < 0.5 * start.timeout_s:
        return _give_up(v, Reason.RESTORE_TIMEOUT, "no restore slot became free in time")
    return Restore(content=content.name, timeout_s=left)


def _give_up(v: View, reason: str, message: str) -> GiveUpRestore:
    assert v.files.hello is not None
    return GiveUpRestore(start=_otherwise(v, reason, message))


def _barrier_step(v: View) -> Step:
    """The server waits at the barrier."""
    order = v.order()
    mine = [x for x in v.candidates if x.source_uid == v.pod.ref.uid]
    if v.files.hold is not None:
        # We are asked, so nobody captures: an agent before us did. What it had not published is lost.
        failed = _fail_order(v, Reason.AGENT_RESTARTED, "the agent was restarted during the capture")
        return failed or Release(resume=True)
    start = v.files.start
    if start is None or start.mode != "cold" or not start.attended:
        return Release()
    if order is not None:
        if not v.capable:
            return FailOrder(content=order.name, reason=Reason.NODE_NOT_CAPABLE, message=v.incapable)
        return Capture(content=order.name)
    if any(not x.deleting for x in mine) or v.pod.settings.capture == Toggle.DISABLED or not v.capable:
        return Release()
    if v.age(READY) >= ORDER_GRACE_S:
        return Release()
    return Wait(why="waiting for the order", until=v.now + ORDER_GRACE_S - v.age(READY))


def _fail_order(v: View, reason: str, message: str) -> FailOrder | None:
    order = v.order()
    return FailOrder(content=order.name, reason=reason, message=message) if order is not None else None


def _released_order(v: View) -> FailOrder | None:
    """An order whose source has left the barrier and that has no artifact will never have one."""
    if v.files.hold is not None:
        return _fail_order(v, Reason.AGENT_RESTARTED, "the agent was restarted before the artifact was complete")
    if v.files.restored is not None:
        return _fail_order(v, Reason.SOURCE_RELEASED, "the replica was restored and never stands at the barrier")
    if v.files.failed is not None:
        return _fail_order(v, Reason.SOURCE_RELEASED, f"no barrier: {v.files.failed.reason}: {v.files.failed.message}")
    return _fail_order(v, Reason.SOURCE_RELEASED, "the replica has left the barrier")


def _released_step(v: View) -> Step:
    failed = _released_order(v)
    if failed is not None:
        return failed
    if v.files.failed is None and foreign(v):
        return Probe(expected=expected(v))
    return Wait(why="released")


def foreign(v: View) -> bool:
    """Whether the server is vLLM's own snapshot child, which does not report."""
    if v.files.ready is not None:
        return v.files.ready.protocol is None
    if v.files.restored is not None:
        content = v.candidate(v.files.restored.content)
        return v.pod.foreign or (content is not None and content.foreign)
    return v.pod.foreign


def expected(v: View) -> Oracle | None:
    """The answer that the serving engine must give; None where nothing was recorded."""
    if v.files.restored is not None:
        content = v.candidate(v.files.restored.content)
        return content.oracle if content is not None and content.oracle is not None else v.files.restore_oracle
    return v.files.ready.oracle if v.files.ready is not None else None


def verdict(v: View) -> tuple[Literal["none", "same", "unknown", "wrong"], str]:
    """What the answer in serving.json proves. `unknown`: there is nothing to compare with, which only a cold start may say."""
    if v.files.serving is None:
        return "none", ""
    want = expected(v)
    if want is None:
        if v.files.restored is not None:
            return "wrong", "the recorded answer is lost"
        return "unknown", ""
    difference = want.differs(Oracle.from_dict(v.files.serving.oracle, "serving.json: oracle"))
    return ("same", "") if difference is None else ("wrong", difference)


def on_trust(v: View) -> bool:
    """Whether a server that does not report is taken for what plain vLLM would be: healthy by its HTTP probe, and started cold.

    A control volume that is missing, full or unreadable must not keep a replica from being ready. A restored one has no such
    way: it is verified or it is not ready. Health of the container before this one does not count. On the node's network it proves
    nothing: another process that has the port answers the kubelet while ours still starts.
    """
    f = v.files
    if v.pod.host_network:
        return False
    if f.serving is not None or f.restored is not None or f.failed is not None or restoring(v) or foreign(v):
        return False
    since = v.pod.healthy_since
    return since is not None and since > f.at.get(HELLO, 0.0) and v.now - since >= TRUST_AFTER_S


def _serving_step(v: View) -> Step:
    failed = _released_order(v)
    if failed is not None:
        return failed
    result, difference = verdict(v)
    if result == "wrong":
        if v.files.restored is not None:
            names = {v.files.restored.content}
        else:
            names = {x.name for x in v.candidates if x.source_uid == v.pod.ref.uid and (x.captured or x.present)}
        return Condemn(contents=tuple(sorted(names)), message=f"wrong answer: {difference}"[:1000])
    found = v.attempt()
    if found is not None and found[1].outcome == "pending":
        took = plausible(v.files.at.get(SERVING, 0.0) - found[1].at)
        return Settle(
            content=found[0], incarnation=found[1].incarnation, outcome="succeeded", reason=Reason.RESTORED, seconds=took or 0.0
        )
    return Wait(why="serving")


# --- cold or restore -------------------------------------------------------------------------------------------------


def choose(v: View) -> Start:
    """The first decision for an incarnation: restore if everything fits, else cold with the most telling reason."""
    hello, settings = v.files.hello, v.pod.settings
    assert hello is not None
    if hello.protocol != PROTOCOL_VERSION:
        message = f"the image speaks protocol {hello.protocol}, the agent {PROTOCOL_VERSION}"
        return _start(v, "cold", Reason.PROTOCOL_VERSION, message)
    if settings.restore_policy == RestorePolicy.DISABLED:
        return _cold(v, Reason.RESTORE_DISABLED, "the snapshot's restore policy is Disabled")
    mine = [x for x in v.candidates if x.source_uid == v.pod.ref.uid]
    if settings.recapture and all(x.open for x in mine):
        return _cold(v, Reason.RECAPTURE, "starts cold to be captured: its artifact replaces the one that is there")
    fitting = [x for x in v.candidates if x.belongs(v.pod, v.node)]
    usable = [x for x in fitting if _unusable(v, x) is None]
    if usable and len(hello.failed_restores) < MAX_RESTORES:
        # Require says that restored is what counts, whatever it takes.
        always = settings.restore_policy == RestorePolicy.REQUIRE
        quicker = [x for x in usable if always or not declined(x.slower, v.now)]
        best = max(quicker or usable, key=lambda x: (x.captured_at, x.name))
        if quicker or best.slower is None:
            return _start(v, "restore", Reason.RESTORED, f"from {best.name}", content=best.name)
        # There is an artifact, so no capture comes of it: without the barrier it is as quick as plain vLLM.
        return _start(v, "cold", Reason.RESTORE_SLOWER, f"{best.name}: {best.slower.why}")
    return _otherwise(v, *_why_not(v, fitting))


def _unusable(v: View, x: Candidate) -> tuple[str, str] | None:
    """Why a content that belongs to the pod cannot be restored from in it now; None if it can."""
    assert v.files.hello is not None
    if not v.capable:
        return Reason.NODE_NOT_CAPABLE, v.incapable
    if x.deleting:
        return Reason.NO_ARTIFACT, f"{x.name} is being deleted"
    if x.quarantined:
        return Reason.ARTIFACT_QUARANTINED, f"{x.name}: {x.quarantined}"
    if x.failed or (x.capture_failed and not x.captured):
        return Reason.NO_ARTIFACT, f"the capture {x.name} failed"
    if not x.captured and not x.present:
        if x.source_uid == v.pod.ref.uid:
            return Reason.NO_ARTIFACT, "this replica is to be captured"
        return Reason.CAPTURE_IN_PROGRESS, f"{x.name} is being captured"
    if not x.present:
        return Reason.ARTIFACT_MISSING, f"the files of {x.name} are not in the store"
    if x.stale:
        # Known before anything is tried, and no failure of the artifact: the node may become again what it was.
        return Reason.IDENTITY_MISMATCH, f"{x.name}: {x.stale}"
    if x.oracle is None:
        return Reason.ARTIFACT_CORRUPT, f"{x.name} has no recorded answer"
    failure = v.files.hello.failed_restores.get(x.name)
    if failure is not None:
        return _died(failure)[0], f"{x.name}: {failure}"
    # With Require there is nothing else to try, and only counted failures lead to a quarantine and so to a new capture.
    if v.pod.settings.restore_policy != RestorePolicy.REQUIRE and x.name in v.blocked:
        word, _, text = v.blocked[x.name].partition(": ")
        return word or Reason.RESTORE_FAILED, f"{x.name}: {text}"
    return None


_TELLING = (
    Reason.NODE_NOT_CAPABLE,
    Reason.CANARY_MISMATCH,
    Reason.RESTORE_DIED,
    Reason.RESTORE_TIMEOUT,
    Reason.RESTORE_FAILED,
    Reason.ARTIFACT_CORRUPT,
    Reason.ARTIFACT_MISSING,
    Reason.ARTIFACT_QUARANTINED,
    Reason.CAPTURE_IN_PROGRESS,
)
"""Reasons for a cold start, the most telling first; others (of CRIU, of the node) say even more and come before them."""


def _why_not(v: View, fitting: list[Candidate]) -> tuple[str, str]:
    if not v.capable:
        return Reason.NODE_NOT_CAPABLE, v.incapable
    reasons = [why for why in (_unusable(v, x) for x in fitting) if why is not None and why[0] != Reason.NO_ARTIFACT]
    if reasons:
        return min(reasons, key=lambda why: _TELLING.index(why[0]) if why[0] in _TELLING else -1)
    other = [x for x in v.candidates if x.snapshot_uid == v.pod.snapshot_uid and x.captured and x.identity != v.pod.identity]
    if other:
        return Reason.NO_ARTIFACT, f"no artifact of this revision on this node; {other[0].name} is of another"
    return Reason.NO_ARTIFACT, "no artifact on this node"


def _otherwise(v: View, reason: str, message: str) -> Start:
    """Not restored: cold, or refused where the policy says that an artifact which exists must be used."""
    if v.pod.settings.restore_policy == RestorePolicy.REQUIRE:
        fitting = [x for x in v.candidates if x.belongs(v.pod, v.node)]
        if any(x.captured and x.present and not (x.quarantined or x.stale or x.deleting) for x in fitting):
            # The operator replaces a pod that says so: the word must reach it.
            why = reason if reason in DISCARD else Reason.RESTORE_REQUIRED
            return _start(v, "refuse", why, f"{reason}: {message}")
    return _cold(v, reason, message)


def _cold(v: View, reason: str, message: str) -> Start:
    """Cold, at the barrier only if a capture can come of it: the barrier costs a rehearsal and a wait."""
    attended = v.capable and v.pod.settings.capture == Toggle.ENABLED
    return _start(v, "cold", reason, message, attended=attended)


def _start(v: View, mode: str, reason: str, message: str, *, attended: bool = False, content: str | None = None) -> Start:
    return Start(
        incarnation=v.files.incarnation,
        mode=mode,
        reason=reason,
        message=message[:2000],
        attended=attended,
        content=content,
        timeout_s=float(v.pod.settings.restore_timeout_seconds),
        restore_bytes_per_s=v.restore_bytes_per_s if attended else None,
    )
