"""Seeing and doing: gathers the view of a pod or a content, asks `decide.py`, does that one step, and looks again.

Nothing is remembered here that matters. Files and ledger are written before the API is told, and the API is told through the
outbox, so an API server that is away delays what is reported and never what is done.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import HELLO, SERVING, START, Hello, Hold, Message, Oracle, Restored, Serving
from vllmsnapshot_child.protocol import Release as ReleaseMarker

from ..api import constants as c
from ..api.constants import Reason
from ..api.types import SnapshotRef, Verification, VerificationOutcome, VLLMSnapshotContentStatus
from ..kube import CONTENTS, EVENTS, PODS, ApiError, Kube, Object
from ..objects import condition, is_true
from . import breakeven, decide, facts, report
from .cache import Cache
from .control import Files, control_path, read_files, write_restored
from .decide import Candidate, Pod, View, next_step
from .errors import RestoreError, StoreError, disk_reason
from .ledger import QUARANTINE_AT_ONCE, Ledger
from .metrics import Metrics
from .nodeops import Digested, Health, NodeOps, Order, Revived, Stored, explain
from .outbox import Outbox
from .room import Room
from .slots import Slots
from .space import Usage
from .verify import Checks

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_STEPS = 64
"""Steps in one pass; a pass that needs more has two steps that undo each other."""
PIDS_TIMEOUT_S = 1.0
"""Raising the PIDs is worth waiting for, but not for long: without it a capture may be harder to restore, nothing worse."""
HOLD_MARGIN_S = 30.0
"""Init releases by itself this long after the capture's own limit."""
PROBE_PAUSE_S = 0.2
"""Between two questions to a foreign server that does not answer yet."""
SUCCESSOR_S = 10.0
"""A container that has started clears the control files within seconds."""
QUEUE_PAUSE_S = 1.0
"""A queued restore looks again this often, besides being woken: its time may be up."""

Ask = Callable[[str, int], Awaitable[Oracle | None]]
"""Asks a server (address, port) the canary prompt; None while it does not answer."""


async def _ask_nobody(_address: str, _port: int) -> Oracle | None:
    return None


@dataclass
class Node:
    """What the parts of the agent share."""

    name: str
    kubelet_dir: str
    ops: NodeOps
    kube: Kube
    ledger: Ledger
    pods: Cache
    contents: Cache
    outbox: Outbox
    ask: Ask = _ask_nobody
    clock: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
    wrote: Callable[[str], None] = lambda _: None  # called after every durable write
    wake_pod: Callable[[str], None] = lambda _: None
    wake_content: Callable[[str], None] = lambda _: None
    wake_node: Callable[[], None] = lambda: None
    health: Health = field(default_factory=lambda: Health(capable=False, message="the node has not been examined yet"))
    usage: Usage = field(default_factory=Usage)
    stored: dict[str, Stored] = field(default_factory=dict)  # a copy of what the store holds; the store itself decides
    busy: Counter[str] = field(default_factory=Counter)  # contents whose files are in use
    told: dict[str, None] = field(default_factory=dict)  # names of events that were written
    metrics: Metrics = field(default_factory=Metrics)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=64, thread_name_prefix="node"))

    def __post_init__(self) -> None:
        self.ledger.settled = self.metrics.settled
        self.room = Room(self)

    async def thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something slow in a thread of our own (asyncio's pool is as small as the machine)."""
        context = contextvars.copy_context()  # what log lines are about
        return await asyncio.get_running_loop().run_in_executor(self.pool, lambda: context.run(function, *args, **kwargs))

    async def refresh(self) -> None:
        """Look into the store again."""
        shelf = await self.thread(self.ops.shelf)
        self.stored = {x.content: x for x in shelf.artifacts}
        self.usage = shelf.usage
        self.wake_node()

    async def measure(self) -> None:
        """See how much room there is."""
        self.usage = await self.thread(self.ops.usage)
        self.wake_node()

    async def quarantine(self, content: str, uid: str, reason: str, message: str) -> None:
        """Let nothing be restored from a content any more; a disk that refuses to remember it does not undo it."""
        try:
            await self.thread(self.ledger.quarantine, content, uid, reason, message)
        except OSError:
            log.exception("the ledger of %s cannot be written", content)

    @contextmanager
    def using(self, content: str) -> Iterator[None]:
        """Keep the files of a content from being deleted."""
        self.busy[content] += 1
        try:
            yield
        finally:
            self.busy[content] -= 1
            if not self.busy[content]:
                del self.busy[content]
            self.wake_content(content)
            self.wake_node()

    def candidates(self) -> tuple[Candidate, ...]:
        """The contents of this node as decisions see them."""
        found = []
        for obj in self.contents.all():
            meta = obj["metadata"]
            entry = self.ledger.entry(meta["name"], meta["uid"])
            item = facts.candidate(obj, self.stored.get(meta["name"]), entry, self.health.environment)
            if item is not None and item.node == self.name:
                found.append(item)
        return tuple(found)

    def tell(self, who: Pod | SnapshotRef, reason: str, action: str, note: str, key: str, *, warning: bool = False) -> None:
        """Write an event, if it has not been written before."""
        pod = who if isinstance(who, Pod) else None
        event = report.Event(
            pod=pod.ref if pod is not None else None,
            namespace=who.ref.namespace if isinstance(who, Pod) else who.namespace,
            snapshot=who.snapshot if isinstance(who, Pod) else who.name,
            snapshot_uid=who.snapshot_uid if isinstance(who, Pod) else who.uid,
            reason=report.word(reason),
            action=action,
            note=note,
            key=key,
            warning=warning,
        )
        for obj in report.events(event, self.name, self.clock()):
            name = obj["metadata"]["name"]
            if name in self.told:
                continue
            self.told[name] = None
            while len(self.told) > 10_000:
                self.told.pop(next(iter(self.told)))

            async def send(obj: Object = obj) -> None:
                await self.kube.create(EVENTS, obj, c.MANAGER_AGENT)

            self.outbox.post(f"event/{name}", send, tries=5)


# --- pods ------------------------------------------------------------------------------------------------------------


class Ages:
    """How old the control files of each pod are, whatever is done to the node's clock.

    Time counts from the moment a file was first seen here; only its age at that moment comes from the wall clock. A clock that is
    set (at boot, typically, while every replica is being restored) would otherwise make a decision look given up while init still
    waits for it, or still waited for when init has long started another engine.
    """

    def __init__(self, clock: Callable[[], float], steady: Callable[[], float]) -> None:
        self._clock, self._steady = clock, steady
        self._seen: dict[str, dict[str, tuple[tuple[str, float], float, float]]] = {}

    def look(self, uid: str, files: Files) -> dict[str, float]:
        """The age of every file (seconds)."""
        now, steady = self._clock(), self._steady()
        before = self._seen.get(uid, {})
        seen = self._seen[uid] = {}
        for name, at in files.at.items():
            key = (files.incarnation, at)
            first = before.get(name)
            seen[name] = first if first is not None and first[0] == key else (key, max(0.0, now - at), steady)
        return {name: age + steady - since for name, (_, age, since) in seen.items()}

    def seen_for(self, uid: str, name: str) -> float:
        """For how long (seconds) this file has been seen here; 0 for one that has not."""
        first = self._seen.get(uid, {}).get(name)
        return 0.0 if first is None else self._steady() - first[2]

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._seen.pop(uid, None)


class Pods:
    """The steps of one pod after another. `settle` of one pod must not run twice at the same time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.slots = Slots(node.wake_pod)
        self.ages = Ages(node.clock, node.steady)

    def observe(self, uid: str) -> View | None:
        """Everything there is to see; None if the pod is not (any more) one of ours."""
        n = self.node
        obj = n.pods.get(uid)
        if obj is None or not facts.ours(obj, n.name):
            return None
        files = read_files(control_path(n.kubelet_dir, uid)) or Files(problems={HELLO: "no control volume"})
        pod = facts.pod_facts(obj)
        obstacle = n.health.obstacle(gpu=pod.gpu)
        return View(
            now=n.clock(),
            node=n.name,
            pod=pod,
            files=files,
            ages=self.ages.look(uid, files),
            candidates=n.candidates(),
            capable=not obstacle,
            incapable=obstacle,
            attempts=tuple(n.ledger.attempts(uid)),
            blocked=n.ledger.blocked(uid),
            restore_bytes_per_s=n.ledger.restore_bytes_per_s(),
        )

    async def settle(self, uid: str) -> float | None:
        """Do steps until there is nothing to do. Seconds after which to look again, None: only when something changes."""
        for _ in range(MAX_STEPS):
            view = self.observe(uid)
            if view is None:
                self.slots.leave(uid)
                return None
            step = next_step(view)
            if not isinstance(step, decide.Restore):
                self.slots.leave(uid)
            if isinstance(step, decide.Answer):
                # Nothing comes before the answer: init, and the user, wait for it.
                await self._do(view, step)
                continue
            self.say(view)
            if isinstance(step, decide.Wait):
                return None if step.until is None else max(0.0, step.until - view.now)
            log.info("%s/%s: %s", view.pod.ref.namespace, view.pod.ref.name, step)
            delay = await self._do(view, step)
            if delay is not None:
                return delay
        log.error("pod %s does not come to rest: %s", uid, step)
        return QUEUE_PAUSE_S

    async def _do(self, v: View, step: decide.Step) -> float | None:
        """One step. Returns a delay where there is nothing more to do for now."""
        match step:
            case decide.Answer():
                await self._answer(v, step)
            case decide.Restore():
                return await self._restore(v, step)
            case decide.GiveUpRestore():
                await self._give_up(v, step)
            case decide.Settle():
                await self._settle_restore(v, step)
            case decide.Release():
                await self._release(v, step)
            case decide.Capture():
                await self._capture(v, step)
            case decide.FailOrder():
                await self._fail_order(v, step)
            case decide.Probe():
                return await self._probe(v, step)
            case decide.Condemn():
                return await self._condemn(v, step)
            case decide.End():
                retired = self.node.thread(self.node.ops.retire, v.pod.ref, step.timeout_s, self._same_life(v))
                await self._try(retired, f"end {v.pod.ref.name}")
                # If it did not work, once more: the server waits. If it did, this lasts until the container is gone.
                return QUEUE_PAUSE_S
            case decide.Wait():
                pass
        return None

    # --- steps ---

    async def _answer(self, v: View, step: decide.Answer) -> None:
        start = step.start
        if start.mode == "cold" and start.attended:
            await self._raise_pids(v)
        # `exclusive`: an answer that is there already, by whomever, stands.
        if await self._save(v, start, exclusive=True):
            self.node.metrics.decided(start)
        log.info("%s/%s: %s (%s) %s", v.pod.ref.namespace, v.pod.ref.name, start.mode, start.reason, start.message)
        self._tell_start(v, start)

    def _tell_start(self, v: View, start: protocol.Start) -> None:
        note = f"{start.reason}: {start.message}"
        if start.mode == "cold":
            self.node.tell(v.pod, Reason.COLD_STARTED, "Start", f"Starts cold, {note}", start.incarnation + start.reason)
        elif start.mode == "refuse":
            self.node.tell(v.pod, start.reason, "Start", f"Start refused, {start.message}", start.incarnation, warning=True)

    async def _restore(self, v: View, step: decide.Restore) -> float | None:
        n, ref, word = self.node, v.pod.ref, v.files.incarnation
        content = v.candidate(step.content)
        assert content is not None
        if not self.slots.take(ref.uid, v.pod.settings.max_concurrent_per_node):
            return QUEUE_PAUSE_S
        try:
            with n.using(step.content):
                try:
                    await n.thread(self._announce, step.content, content.uid, v)
                    revived = await n.thread(n.ops.restore, ref, step.content, step.timeout_s, self._wanted(v))
                except Exception as e:  # whatever the node did: the replica starts cold
                    await self._restore_failed(v, content, e)
                    return None
            await n.thread(
                self._write_restored,
                ref.uid,
                Restored(incarnation=word, pid=revived.pid, content=step.content),
                dict(revived.phases),
                content.oracle,
            )
            n.wrote("restored.json")
            await self._try(n.thread(self._moved, revived), "note the throughput of the restore")
            return None
        finally:
            self.slots.leave(ref.uid)

    def _announce(self, content: str, uid: str, v: View) -> None:
        """Before anything is done in the container, or an agent after us would not know what it finds there."""
        try:
            self.node.ledger.begin(content, uid, v.pod.ref.uid, v.files.incarnation, self.node.clock())
        except OSError as e:
            raise StoreError(disk_reason(e), f"the ledger cannot be written: {e}") from e

    def _wanted(self, v: View) -> Callable[[], None]:
        """Raises if init may have started another engine in the meantime."""
        start = v.files.start
        assert start is not None
        deadline = self.node.steady() + start.timeout_s - 0.5 - v.age(START)
        same_life = self._same_life(v)

        def check() -> None:
            if self.node.steady() >= deadline:
                raise TimeoutError("init no longer waits for the tree")
            same_life()

        return check

    def _same_life(self, v: View) -> Callable[[], None]:
        """Raises RestoreError if the container has started over since."""

        def check() -> None:
            with protocol.open_dir(control_path(self.node.kubelet_dir, v.pod.ref.uid)) as fd:
                hello = Hello.load(fd)
            if hello is None or hello.incarnation != v.files.incarnation:
                raise RestoreError(Reason.RESTORE_DIED, "the container started over in the meantime")

        return check

    def _moved(self, revived: Revived) -> None:
        # Without the digests, which are compared once per boot.
        seconds = revived.phases.get("restore", 0.0) - revived.phases.get("verify", 0.0)
        self.node.ledger.moved(revived.bytes, seconds)

    def _write_restored(self, uid: str, message: Restored, phases: dict[str, float], oracle: Oracle | None) -> None:
        with protocol.open_dir(control_path(self.node.kubelet_dir, uid)) as fd:
            write_restored(fd, message, phases, oracle)

    async def _restore_failed(self, v: View, content: Candidate, error: Exception) -> None:
        default = Reason.RESTORE_TIMEOUT if isinstance(error, TimeoutError) else Reason.RESTORE_FAILED
        reason, message = explain(error, default)
        pod = self.node.pods.get(v.pod.ref.uid)
        if (pod is None or "deletionTimestamp" in pod["metadata"]) and reason not in QUARANTINE_AT_ONCE:
            # Its PID 1 was told to end, and took CRIU along.
            reason, message = Reason.SOURCE_GONE, f"the pod was deleted during the restore: {message}"
        log.warning("%s/%s: restore from %s: %s", v.pod.ref.namespace, v.pod.ref.name, content.name, message, exc_info=error)
        await self._settle_restore(
            v,
            decide.Settle(
                content=content.name, incarnation=v.files.incarnation, outcome="failed", reason=reason, message=message
            ),
        )
        if reason in (Reason.ARTIFACT_MISSING, Reason.ARTIFACT_CORRUPT):
            await self._try(self.node.refresh(), "look into the store")

    async def _settle_restore(self, v: View, step: decide.Settle) -> None:
        n = self.node
        settled = await n.thread(self._settle_in_ledger, step.content, v.pod.ref.uid, step, self._budget(step.content))
        if settled:
            note = f"{step.content}: {step.reason}: {step.message}"
            if step.outcome == "succeeded":
                seconds = v.now - v.files.at.get(START, v.now)
                note = f"Serves, restored from {step.content}, {seconds:.1f} s after the decision"
                n.tell(v.pod, Reason.RESTORED, "Restore", note, step.incarnation)
            elif step.outcome == "failed":
                n.tell(v.pod, Reason.RESTORE_FAILED, "Restore", note, step.incarnation, warning=True)
        n.wake_content(step.content)

    def _settle_in_ledger(self, content: str, pod: str, step: decide.Settle, budget: int) -> bool:
        try:
            return self.node.ledger.settle(
                content, pod, step.incarnation, step.outcome, step.reason, step.message, budget=budget, seconds=step.seconds
            )
        except OSError:
            # Memory has it. A disk that is full must not keep the replica from starting cold.
            log.exception("the ledger of %s cannot be written", content)
            return True

    def _budget(self, content: str) -> int:
        obj = self.node.contents.get(content)
        spec = facts.content_spec(obj) if obj is not None else None
        return spec.failure_budget if spec is not None else 3

    async def _give_up(self, v: View, step: decide.GiveUpRestore) -> None:
        await self._try(self.node.thread(self.node.ops.clear, v.pod.ref), f"clear {v.pod.ref.name}")
        if step.start.attended:
            await self._raise_pids(v)
        await self._save(v, step.start)
        self.node.metrics.decided(step.start)
        self._tell_start(v, step.start)

    async def _release(self, v: View, step: decide.Release) -> None:
        if step.resume:
            await self._try(self.node.thread(self.node.ops.resume, v.pod.ref), f"resume {v.pod.ref.name}")
        await self._save(v, self._marker(v, moved=v.files.restored is not None), exclusive=True)

    def _marker(self, v: View, *, moved: bool) -> ReleaseMarker:
        """`moved`: the engine's state on a GPU, if it has one, was put back by the driver; then its end is ours to attend."""
        return ReleaseMarker(
            incarnation=v.files.incarnation,
            host=v.pod.host,
            port=v.pod.port,
            env={**v.pod.env, c.ENV_PORT: str(v.pod.port)},
            # vLLM's own server knows nothing of it.
            attend_end=moved and v.pod.gpu and self.node.health.gpu == "" and not decide.foreign(v),
        )

    async def _capture(self, v: View, step: decide.Capture) -> None:
        n, ref = self.node, v.pod.ref
        obj = n.contents.get(step.content)
        spec = facts.content_spec(obj) if obj is not None else None
        ready = v.files.ready
        if obj is None or spec is None or ready is None:
            return
        uid = obj["metadata"]["uid"]
        await self._save(v, Hold(incarnation=v.files.incarnation, timeout_s=spec.timeout_seconds + HOLD_MARGIN_S))
        n.tell(v.pod, Reason.CAPTURE_STARTED, "Capture", f"Captures {step.content}", step.content)
        now = self.observe(ref.uid)
        if now is not None:
            self.say(now)
        order = Order(
            content=step.content,
            content_uid=uid,
            identity=spec.identity,
            snapshot_uid=spec.snapshot_ref.uid,
            timeout_s=float(spec.timeout_seconds),
            oracle=ready.oracle,
            max_bytes=spec.max_artifact_bytes,
            host_network=v.pod.host_network,
            foreign=ready.protocol is None,
            weights=ready.weights,
            weights_reason=ready.weights_reason[:1000],
            cold_s=breakeven.cold_s(v.files),
        )
        marker = self._marker(v, moved=True)
        loop = asyncio.get_running_loop()

        def resumed() -> None:
            # In the thread of the capture: the replica serves while its artifact is still being written to the disk.
            self._write(ref.uid, marker, exclusive=True)
            loop.call_soon_threadsafe(self._say_again, ref.uid)

        def room(size: int) -> None:
            for name in n.room.take(step.content, size):
                loop.call_soon_threadsafe(n.wake_content, name)

        with n.using(step.content):
            try:
                stored = await n.thread(n.ops.capture, ref, order, room, resumed)
            except Exception as e:
                reason, message = explain(e, Reason.DUMP_FAILED)
                log.warning("%s/%s: capture %s: %s: %s", ref.namespace, ref.name, step.content, reason, message, exc_info=e)
                await self._note_failed(step.content, uid, reason, message)
            else:
                n.stored[step.content] = stored
            finally:
                n.room.give_back(step.content)
        n.wake_content(step.content)
        await self._try(n.measure(), "measure the store")

    def _say_again(self, uid: str) -> None:
        view = self.observe(uid)
        if view is not None:
            self.say(view)

    async def _note_failed(self, content: str, uid: str, reason: str, message: str) -> None:
        try:
            await self.node.thread(self.node.ledger.capture_failed, content, uid, reason, message)
        except OSError:
            log.exception("the ledger of %s cannot be written", content)

    async def _fail_order(self, v: View, step: decide.FailOrder) -> None:
        content = v.candidate(step.content)
        assert content is not None
        await self._note_failed(step.content, content.uid, step.reason, step.message)
        self.node.wake_content(step.content)

    async def _probe(self, v: View, step: decide.Probe) -> float | None:
        answer = await self.node.ask(v.pod.address, v.pod.port) if v.pod.address else None
        if answer is None:
            return PROBE_PAUSE_S
        if not answer.token_ids and step.expected is not None:
            # A server that tells no token ids is believed in them: text and logprob are compared.
            answer = Oracle(
                token_ids=step.expected.token_ids, text=answer.text, sampled_token_logprob=answer.sampled_token_logprob
            )
        # Written in the server's place, so that from here on it is as if it had reported by itself.
        await self._save(
            v,
            Serving(
                incarnation=v.files.incarnation,
                host=v.pod.host,
                port=v.pod.port,
                oracle={**answer.to_dict(), "token_ids": answer.token_ids or [0]},
            ),
        )
        return None

    async def _condemn(self, v: View, step: decide.Condemn) -> float:
        n = self.node
        found = v.attempt()
        if found is not None and found[1].outcome == "pending":
            await self._settle_restore(
                v,
                decide.Settle(
                    content=found[0],
                    incarnation=found[1].incarnation,
                    outcome="failed",
                    reason=Reason.CANARY_MISMATCH,
                    message=step.message,
                ),
            )
        for name in step.contents:
            content = v.candidate(name)
            if content is not None:
                await n.quarantine(name, content.uid, Reason.CANARY_MISMATCH, step.message)
                n.wake_content(name)
        n.tell(v.pod, Reason.CANARY_MISMATCH, "Verify", step.message, v.files.incarnation, warning=True)
        # PID 1, not the tree alone: the kernel ends the whole namespace at once, and the kubelet counts and backs off.
        # The age guards its successor, which may be running before it has cleared the files that we still see. Where a file was
        # written before the clock was set its age is wrong: one that we have seen for long is certainly that old.
        old = v.age(SERVING)
        seen = self.ages.seen_for(v.pod.ref.uid, SERVING)
        if seen > SUCCESSOR_S:
            old = min(old, seen)
        await self._try(n.thread(n.ops.end, v.pod.ref, old), f"end {v.pod.ref.name}")
        return QUEUE_PAUSE_S

    # --- small parts ---

    async def _raise_pids(self, v: View) -> None:
        try:
            await asyncio.wait_for(self.node.thread(self.node.ops.raise_pids, v.pod.ref), PIDS_TIMEOUT_S)
        except Exception as e:
            log.warning("%s/%s: PIDs not raised: %s", v.pod.ref.namespace, v.pod.ref.name, explain(e, "Error")[1])

    async def _save(self, v: View, message: Message, *, exclusive: bool = False) -> bool:
        return await self.node.thread(self._write, v.pod.ref.uid, message, exclusive=exclusive)

    def _write(self, uid: str, message: Message, *, exclusive: bool = False) -> bool:
        """Write a control file; False if it is there already and must not be replaced, or is nobody's any more."""
        with protocol.open_dir(control_path(self.node.kubelet_dir, uid)) as fd:
            hello = Hello.load(fd)
            if hello is None or hello.incarnation != message.incarnation:
                # The container has started over since; what is left of this race, the next writer displaces.
                log.info("pod %s: %s is not written, its container has started over", uid, message.FILE)
                return False
            written = message.save(fd, exclusive=exclusive)
        self.node.wrote(message.FILE)
        return written

    async def _try(self, doing: Awaitable[Any], what: str) -> None:
        try:
            await doing
        except Exception as e:
            log.warning("cannot %s: %s", what, explain(e, "Error"), exc_info=e)

    # --- reports ---

    def say(self, v: View) -> None:
        """Bring the pod's condition, label and annotation in line with what is seen, if they are not."""
        obj = self.node.pods.get(v.pod.ref.uid)
        if obj is None or v.pod.deleting:
            return
        before = facts.report_of(obj)
        if HELLO in v.files.problems and before.incarnation:
            # A volume that cannot be read (any more) is no news of the container.
            return
        said = report.say(v, before)
        if said is None:
            return
        key = f"pod/{v.pod.ref.uid}"
        if not (self._condition_differs(obj, said) or self._metadata_differs(obj, said) or self.node.outbox.waits(key)):
            return
        self.node.metrics.will_report(v.pod.ref.uid, before, said.report)

        async def send() -> None:
            current = self.node.pods.get(v.pod.ref.uid)
            # The condition first: it is what readiness waits for.
            if current is not None and self._condition_differs(current, said):
                have = condition(current, c.CONDITION_VERIFIED)
                body = report.pod_condition(v.pod.ref, said.verified, have, self.node.clock())
                self.node.pods.put(await self.node.kube.apply(PODS, body, c.MANAGER_AGENT, subresource="status"))
                self.node.wrote("pod status")
            current = self.node.pods.get(v.pod.ref.uid)
            if current is not None and self._metadata_differs(current, said):
                body = report.pod_metadata(v.pod.ref, said)
                now = await self.node.kube.apply(PODS, body, c.MANAGER_AGENT)
                self.node.pods.put(now)
                self.node.metrics.reported(now)
                self.node.wrote("pod metadata")

        self.node.outbox.post(key, send)

    @staticmethod
    def _condition_differs(obj: Object, said: report.Said) -> bool:
        have = condition(obj, c.CONDITION_VERIFIED)
        if not have:
            # A gate without condition is closed as well: "not yet" need not be written before anything else was.
            return not (said.verified.status == "False" and said.verified.reason == Reason.STARTING)
        return any(have.get(k) != getattr(said.verified, k) for k in ("status", "reason", "message"))

    @staticmethod
    def _metadata_differs(obj: Object, said: report.Said) -> bool:
        meta = obj["metadata"]
        label = (meta.get("labels") or {}).get(c.LABEL_START_MODE)
        text = (meta.get("annotations") or {}).get(c.ANNOTATION_REPORT)
        return label != said.start_mode or text != report.report_json(said.report)


# --- contents --------------------------------------------------------------------------------------------------------


class Contents:
    """Keeps the status of this node's contents in line with store and ledger, and deletes files whose content goes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.checks = Checks(self._digest, lambda name: self.node.wake_content(name), node.clock)

    async def settle(self, name: str) -> float | None:
        """One content. Seconds after which to look again, None: only when something changes. Raises ApiError."""
        n = self.node
        obj = n.contents.get(name)
        spec = facts.content_spec(obj) if obj is not None else None
        if obj is None or spec is None or spec.node_name != n.name:
            return None
        if "deletionTimestamp" in obj["metadata"]:
            return await self._delete(obj)
        uid = obj["metadata"]["uid"]
        old = facts.content_status(obj)
        counts = old.restores
        if counts is not None and not n.ledger.known(name, uid):
            await n.thread(
                n.ledger.adopt,
                name,
                uid,
                succeeded=counts.succeeded,
                failed=counts.failed,
                consecutive=counts.consecutive_failures,
                last_failure=counts.last_failure or "",
            )
        settled = is_true(obj, c.CAPTURED) or is_true(obj, c.FAILED)
        verification = await self._verification(obj, old) if settled else None
        entry = n.ledger.entry(name, uid)
        stored = n.stored.get(name)
        if stored is not None and stored.content_uid not in ("", uid):
            stored = None
        if stored is not None and is_true(obj, c.CAPTURED) and not facts.recorded(obj, stored):
            message = f"the manifest is not the recorded one: its digest is {stored.digest}"
            await n.quarantine(name, uid, Reason.ARTIFACT_CORRUPT, message)
            entry = n.ledger.entry(name, uid)
        failed: tuple[str, str] | None = None
        delay: float | None = None
        if entry.capture_failed is not None:
            failed = (entry.capture_failed.reason, entry.capture_failed.message)
        elif not settled and facts.strange(spec):
            failed = (Reason.PROTOCOL_VERSION, facts.strange(spec))
        elif not settled and stored is None:
            failed, delay = await self._source_gone(spec.snapshot_ref.namespace, spec.source_pod.name, spec.source_pod.uid)
        lost = False
        if is_true(obj, c.CAPTURED) and stored is None:
            lost = await n.thread(n.ops.artifact, name) is None
        if stored is not None and (failed is not None or is_true(obj, c.FAILED)) and not is_true(obj, c.CAPTURED):
            # Failed is what everybody was told: files that turned up nevertheless are nobody's.
            await self._drop_files(name)
            stored = None
        new = report.content_status(old, stored, entry, failed=failed, lost=lost, now=n.clock(), verification=verification)
        if new != old or n.outbox.waits(f"content/{name}"):
            self._write(obj, new)
        return delay

    async def _verification(self, obj: Object, old: VLLMSnapshotContentStatus) -> Verification | None:
        """The outcome of the verification that is asked for, once it is there; the ledger knows first of what it means."""
        name, uid = obj["metadata"]["name"], obj["metadata"]["uid"]
        request = str((obj["metadata"].get("annotations") or {}).get(c.ANNOTATION_VERIFY) or "")[:128]
        if not request or (old.verification is not None and old.verification.request == request):
            self.checks.forget(name)
            return None
        found = self.checks.answer(name, uid, request)
        if found is not None and found.outcome == VerificationOutcome.CORRUPT:
            await self.node.quarantine(name, uid, Reason.ARTIFACT_CORRUPT, found.message)
        return found

    async def _digest(self, name: str) -> Digested:
        with self.node.using(name):
            return await self.node.thread(self.node.ops.verify, name)

    def _write(self, obj: Object, status: VLLMSnapshotContentStatus) -> None:
        n, name, uid = self.node, obj["metadata"]["name"], obj["metadata"]["uid"]
        body = {"metadata": {"name": name, "uid": uid}, "status": status.dump()}
        n.metrics.will_answer(name, obj, status)

        async def send() -> None:
            current = n.contents.get(name)
            if current is None or facts.content_status(current) == status:
                return
            now = await n.kube.apply(CONTENTS, body, c.MANAGER_AGENT, subresource="status")
            news = n.contents.put(now)
            n.metrics.answered(now)
            n.wrote("content status")
            self._tell(now)
            if news:  # else the server dropped what is new to it (an older CRD), and would do so again
                n.wake_content(name)
            n.wake_node()

        n.outbox.post(f"content/{name}", send)

    def _tell(self, obj: Object) -> None:
        spec = facts.content_spec(obj)
        evicted = condition(obj, c.QUARANTINED)
        if spec is not None and evicted.get("reason") == Reason.EVICTED:
            note = f"{obj['metadata']['name']} on node {self.node.name}: {evicted.get('message')}"
            self.node.tell(spec.snapshot_ref, Reason.EVICTED, "Evict", note, obj["metadata"]["uid"])
            return
        pod = self.node.pods.get(spec.source_pod.uid) if spec is not None else None
        if spec is None or pod is None:
            return
        name, pod_facts = obj["metadata"]["name"], facts.pod_facts(pod)
        captured, failed = condition(obj, c.CAPTURED), condition(obj, c.FAILED)
        if captured.get("status") == "True":
            self.node.tell(pod_facts, Reason.CAPTURED, "Capture", f"Captured {name}, {captured.get('message')}", name)
        elif failed.get("status") == "True":
            note = f"{name}: {failed.get('reason')}: {failed.get('message')}"
            self.node.tell(pod_facts, Reason.CAPTURE_FAILED, "Capture", note, name, warning=True)

    async def _source_gone(self, namespace: str, name: str, uid: str) -> tuple[tuple[str, str] | None, float | None]:
        """Why the source of an open order can never be captured, if so. Only a live answer of the API server counts."""
        n = self.node
        if n.pods.get(uid) is not None:
            return None, None
        pod = await n.kube.get(PODS, name, namespace)
        if pod is None or pod["metadata"]["uid"] != uid:
            return (Reason.SOURCE_GONE, f"pod {namespace}/{name} is gone"), None
        if not facts.ours(pod, n.name):
            return (Reason.SOURCE_GONE, f"pod {namespace}/{name} is no replica on this node"), None
        n.pods.put(pod)
        n.wake_pod(uid)
        return None, None

    async def _delete(self, obj: Object) -> float | None:
        """Files first, then the finalizer: an object that is gone has no files left."""
        n, meta = self.node, obj["metadata"]
        finalizers = meta.get("finalizers") or []
        if c.FINALIZER_CONTENT not in finalizers:
            return None
        if n.busy[meta["name"]]:
            return QUEUE_PAUSE_S
        await self._drop_files(meta["name"])
        await n.thread(n.ledger.forget, meta["name"])
        i = finalizers.index(c.FINALIZER_CONTENT)
        operations: list[Object] = [
            {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
            {"op": "test", "path": f"/metadata/finalizers/{i}", "value": c.FINALIZER_CONTENT},
            {"op": "remove", "path": f"/metadata/finalizers/{i}"},
        ]
        try:
            await n.kube.patch(CONTENTS, meta["name"], None, operations, c.MANAGER_AGENT)
        except ApiError as e:
            if e.status != 422:
                raise
            # The list of finalizers moved: the watch tells, and we come again.
            return QUEUE_PAUSE_S
        n.wrote("finalizer")
        return None

    async def _drop_files(self, name: str) -> None:
        n = self.node
        await n.thread(n.ops.delete_artifact, name)
        n.stored.pop(name, None)
        n.wrote("artifact deleted")
        await n.measure()

    async def collect(self) -> None:
        """Delete artifacts and ledger entries that no content object stands for. Raises ApiError.

        The store is read before the API server: an artifact that is there now had its content before.
        """
        n = self.node
        await n.refresh()
        await self._save_ledger()
        await n.thread(n.ops.sweep)
        for name in await n.thread(n.room.relieve):
            n.wake_content(name)
        # Also those whose manifest cannot be read.
        held, remembered = await n.thread(n.ops.held), n.ledger.contents()
        live = {x["metadata"]["name"]: x["metadata"]["uid"] for x in await n.kube.list(CONTENTS)}
        for name in held:
            stored = n.stored.get(name)
            other = stored is not None and stored.content_uid not in ("", live.get(name))
            if (name not in live or other) and not n.busy[name]:
                log.warning("deleting artifact %s: no content stands for it", name)
                await self._drop_files(name)
        for name in remembered:
            if name not in live and not n.busy[name]:
                await n.thread(n.ledger.forget, name)

    async def _save_ledger(self) -> None:
        try:
            await self.node.thread(self.node.ledger.save)
        except OSError as e:
            log.warning("the ledger cannot be written: %s", e)


def watch_path(node: Node, uid: str) -> str:
    """The directory to watch for a pod."""
    return os.path.normpath(control_path(node.kubelet_dir, uid))
