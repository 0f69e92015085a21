"""One pod after another: gathers the view of it, asks `decide.py`, does that one step, and looks again."""

from __future__ import annotations

import asyncio
import functools
import logging

from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import HELLO, SERVING, Message, Oracle, Serving

from ..api.constants import Reason
from . import decide, facts
from .ages import Ages
from .attempts import Attempts
from .control import Files
from .decide import View, next_step
from .node import AGAIN_S, Node
from .nodeops import explain
from .orders import Orders
from .pod_status import PodStatus
from .slots import Slots

log = logging.getLogger(__name__)

MAX_STEPS = 64
"""Steps in one pass; a pass that needs more has two steps that undo each other."""
PIDS_TIMEOUT_S = 1.0
"""Raising the PIDs is worth waiting for, but not for long: without it a capture may be harder to restore, nothing worse."""
PROBE_PAUSE_S = 0.2
"""Between two questions to a foreign server that does not answer yet."""
SUCCESSOR_S = 10.0
"""A container that has started clears the control files within seconds."""


class Pods:
    """The steps of one pod after another. `settle` of one pod must not run twice at the same time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.slots = Slots(node.wake_pod)
        self.ages = Ages(node.clock, node.steady)
        self.status = PodStatus(node)
        self.attempts = Attempts(node, self.slots)
        self.orders = Orders(node, self.report)

    def observe(self, uid: str) -> View | None:
        """Everything there is to see; None if the pod is not (any more) one of ours."""
        n = self.node
        obj = n.pods.get(uid)
        if obj is None or not facts.ours(obj, n.name):
            return None
        files = n.volumes.read(uid) or Files(problems={HELLO: "no control volume"})
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

    def report(self, uid: str) -> None:
        """Say what there is to see now."""
        view = self.observe(uid)
        if view is not None:
            self.status.say(view)

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
            self.status.say(view)
            if isinstance(step, decide.Wait):
                return None if step.until is None else max(0.0, step.until - view.now)
            log.info("%s/%s: %s", view.pod.ref.namespace, view.pod.ref.name, step)
            delay = await self._do(view, step)
            if delay is not None:
                return delay
        log.error("pod %s does not come to rest: %s", uid, step)
        return AGAIN_S

    async def _do(self, v: View, step: decide.Step) -> float | None:
        """One step. Returns a delay where there is nothing more to do for now."""
        match step:
            case decide.Answer():
                await self._answer(v, step)
            case decide.Restore():
                return await self.attempts.restore(v, step)
            case decide.GiveUpRestore():
                await self._give_up(v, step)
            case decide.Settle():
                await self.attempts.settle(v, step)
            case decide.Release():
                await self._release(v, step)
            case decide.Capture():
                await self.orders.capture(v, step)
            case decide.FailOrder():
                await self.orders.fail(v, step)
            case decide.Probe():
                return await self._probe(v, step)
            case decide.Condemn():
                return await self._condemn(v, step)
            case decide.End():
                return await self._end(v, step)
            case decide.Wait():
                pass
        return None

    # --- how it starts ---

    async def _answer(self, v: View, step: decide.Answer) -> None:
        start = step.start
        if start.mode == "cold" and start.attended:
            await self._raise_pids(v)
        # `exclusive`: an answer that is there already, by whomever, stands.
        if await self._save(v, start, exclusive=True):
            self.node.metrics.decided(start)
        log.info("%s/%s: %s (%s) %s", v.pod.ref.namespace, v.pod.ref.name, start.mode, start.reason, start.message)
        self._tell_start(v, start)

    async def _give_up(self, v: View, step: decide.GiveUpRestore) -> None:
        n = self.node
        await n.best_effort(n.thread(n.ops.clear, v.pod.ref), f"clear {v.pod.ref.name}")
        if step.start.attended:
            await self._raise_pids(v)
        await self._save(v, step.start)
        n.metrics.decided(step.start)
        self._tell_start(v, step.start)

    def _tell_start(self, v: View, start: protocol.Start) -> None:
        note = f"{start.reason}: {start.message}"
        if start.mode == "cold":
            self.node.tell(v.pod, Reason.COLD_STARTED, "Start", f"Starts cold, {note}", start.incarnation + start.reason)
        elif start.mode == "refuse" and start.reason != Reason.POD_DELETED:
            self.node.tell(v.pod, start.reason, "Start", f"Start refused, {start.message}", start.incarnation, warning=True)

    async def _raise_pids(self, v: View) -> None:
        try:
            await asyncio.wait_for(self.node.thread(self.node.ops.raise_pids, v.pod.ref), PIDS_TIMEOUT_S)
        except Exception as e:
            log.warning("%s/%s: PIDs not raised: %s", v.pod.ref.namespace, v.pod.ref.name, explain(e, "Error")[1])

    # --- how it goes on ---

    async def _release(self, v: View, step: decide.Release) -> None:
        n = self.node
        if step.resume:
            await n.best_effort(n.thread(n.ops.resume, v.pod.ref), f"resume {v.pod.ref.name}")
        marker = decide.marker(v, moved=v.files.restored is not None, gpu_fine=n.health.gpu == "")
        await self._save(v, marker, exclusive=True)

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

    async def _save(self, v: View, message: Message, *, exclusive: bool = False) -> bool:
        return await self.node.thread(self.node.volumes.write, v.pod.ref.uid, message, exclusive=exclusive)

    # --- how it ends ---

    async def _condemn(self, v: View, step: decide.Condemn) -> float:
        n = self.node
        found = v.attempt()
        if found is not None and found[1].outcome == "pending":
            await self.attempts.settle(
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
        await n.best_effort(n.thread(n.ops.end, v.pod.ref, old), f"end {v.pod.ref.name}")
        return AGAIN_S

    async def _end(self, v: View, step: decide.End) -> float:
        n, ref = self.node, v.pod.ref
        same = functools.partial(n.volumes.insist, ref.uid, v.files.incarnation)
        await n.best_effort(n.thread(n.ops.retire, ref, step.timeout_s, same), f"end {ref.name}")
        # If it did not work, once more: the server waits. If it did, this lasts until the container is gone.
        return AGAIN_S
