"""Verifications that a user asks for: every digest of an artifact computed again, in the background, one artifact at a time.

The request is an annotation on the content, the answer a record in its status. What is lost with the process is asked for
still, and done again by the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..api.constants import Reason
from ..api.types import Verification, VerificationOutcome, duration
from ..objects import rfc3339
from .nodeops import Digested, explain

log = logging.getLogger(__name__)

Digest = Callable[[str], Awaitable[Digested]]
"""Computes and compares every digest of a content. Raises errors as `nodeops.explain` understands them."""

OUTCOMES = {Reason.ARTIFACT_CORRUPT: VerificationOutcome.CORRUPT, Reason.ARTIFACT_MISSING: VerificationOutcome.MISSING}
"""What an error proves; any other proves nothing about the artifact."""


class Checks:
    """The verifications of this node. `done(content)` is called after each; `clock` gives Unix seconds."""

    def __init__(self, digest: Digest, done: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._digest = digest
        self._done = done
        self._clock = clock
        # Each reads a whole artifact: two at once would take twice as long, and the disk is what restores read from.
        self._turn = asyncio.Semaphore(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._found: dict[str, tuple[str, Verification]] = {}

    def answer(self, content: str, uid: str, request: str) -> Verification | None:
        """The outcome of this request, or None while it is being worked on; the first call begins the work."""
        of, found = self._found.get(content, ("", None))
        if found is not None and (of, found.request) == (uid, request):
            return found
        if content not in self._tasks:
            self._tasks[content] = asyncio.create_task(self._check(content, uid, request), name=f"verify {content}")
        return None

    def forget(self, content: str) -> None:
        """The outcome is on record, or the content is gone."""
        self._found.pop(content, None)

    async def drain(self) -> None:
        """Wait until nothing is being verified."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _check(self, content: str, uid: str, request: str) -> None:
        try:
            async with self._turn:
                begun = self._clock()
                outcome, message, digested = VerificationOutcome.INTACT, "", Digested()
                try:
                    digested = await self._digest(content)
                except Exception as e:
                    reason, message = explain(e, Reason.STORE_FAILED)
                    outcome = OUTCOMES.get(reason, VerificationOutcome.FAILED)
                now = self._clock()
                log.info("verified %s: %s %s", content, outcome, message)
            self._found[content] = (
                uid,
                Verification(
                    request=request,
                    outcome=outcome,
                    message=message[:4096],
                    files=digested.files,
                    bytes=digested.bytes,
                    took=duration(now - begun),
                    finished_at=rfc3339(now),
                ),
            )
        finally:
            del self._tasks[content]
            self._done(content)
