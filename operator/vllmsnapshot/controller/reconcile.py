"""One pass over one claim: observe, plan, execute, report. Level-triggered: what woke it is not an input."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from ..api import constants as c
from ..kube import EVENTS, SNAPSHOTS, ApiError, Kube
from ..world import Claim
from . import events, status
from .execute import Executor
from .metrics import Metrics
from .observe import Key, Observer
from .plan import plan
from .workqueue import Wait

log = logging.getLogger(__name__)


class Reconciler:
    """Reconciles claims. `clock` gives seconds since the epoch; agents live in `agent_namespace`."""

    def __init__(
        self,
        kube: Kube,
        agent_namespace: str,
        *,
        clock: Callable[[], float] = time.time,
        share_s: float = 1.0,
        metrics: Metrics | None = None,
    ) -> None:
        self._kube = kube
        self._metrics = metrics or Metrics()
        self._clock = clock
        self.observer = Observer(kube, agent_namespace, share_s=share_s)
        self._executor = Executor(kube, clock)
        self._instance = socket.gethostname()

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns seconds until the next one is due without an event. Raises Wait and ApiError to be retried."""
        try:
            return await self._pass(key)
        except ApiError as e:
            # The claim or what belongs to it has gone, or has a successor, since it was observed: no failure, look again.
            if e.conflict or e.status == 404:
                raise Wait(str(e)) from e
            raise

    async def _pass(self, key: Key) -> float | None:
        # 1. Observe: live, from the API server.
        seen = await self.observer.claim(key)
        if seen is None:
            self._metrics.gone(key)
            return None
        claim, observed = seen
        # 2. Plan: pure.
        todo = plan(claim, observed, self._clock())
        # 3. Execute: idempotent; a refusal is a finding, a transient error ends the pass.
        outcome = await self._executor.run(claim, todo.actions)
        if outcome.error is not None:
            raise outcome.error
        if claim.deleting and not outcome.problems:
            return todo.requeue_after  # nobody reads it any more
        # 4. Report: one write, only if something changed.
        report = status.compute(claim, observed, todo, outcome.problems, self._clock())
        self._metrics.saw(claim, observed, report)
        if status.changed(claim, report):
            await self._write(claim, report.dump())
            # 5. Events: on transitions, once they are on record.
            await self._announce(claim, events.transitions(claim.conditions, report.conditions or ()))
        # 6. What was refused is tried again, with growing delays.
        if outcome.problems:
            raise Wait("; ".join(problem.message for problem in outcome.problems))
        return todo.requeue_after

    async def housekeep(self) -> None:
        """What belongs to no claim: contents of nodes that are gone (their claims may be gone too)."""
        for content in await self.observer.orphans():
            try:
                await self._executor.bury(content)
            except ApiError as e:
                if not e.refused:
                    raise
                # One that a policy protects must not keep the others, nor the resync, from being done.
                log.warning("content %s is left: %s", content.name, e)

    async def _write(self, claim: Claim, body: dict[str, object]) -> None:
        meta = {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid}
        await self._kube.apply(SNAPSHOTS, {"metadata": meta, "status": body}, c.MANAGER_OPERATOR, subresource="status")

    async def _announce(self, claim: Claim, notes: list[events.Note]) -> None:
        for note in notes:
            try:
                await self._kube.create(EVENTS, events.build(claim, note, self._clock(), self._instance), c.MANAGER_OPERATOR)
            except ApiError as e:
                # The status has it already; an event is not worth a second pass.
                log.warning("%s/%s: event %s was not written: %s", claim.namespace, claim.name, note.reason, e)
