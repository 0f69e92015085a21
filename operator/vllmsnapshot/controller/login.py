"""With what kopf asks the API server, and when again after the API server has answered 401.

kopf asks for credentials at its start, when they expire, and when they were refused. What was refused it never takes again: with
the same credentials in its hands it ends, and the operator with it. But a 401 says nothing for good (an API server that has just
been started answers so for a moment; a token was rotated meanwhile), so the same credentials are handed out again, as others: their
`expiration` differs.

kopf asks again at once for as long as it is refused. So the pauses are made here, and kopf's watches wait meanwhile. Nothing of the
work does: passes have a client of their own, and are woken by the resync.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import kopf

from ..kube import REQUEST_TIMEOUT_S
from .workqueue import Backoff

log = logging.getLogger("vllmsnapshot.operator")

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts token and certificate authority."""

PAUSES: Final = Backoff(base_s=1.0, cap_s=30.0)
"""Pauses of 1, 2, 4, 8, 16 and then 30 seconds: an API server that is starting is ready within some seconds, and one that goes on
refusing gets one request of each watch in 30 s. Longer ones would save nothing: the resync asks every 30 s, too."""

PROVEN_S: Final = REQUEST_TIMEOUT_S
"""Credentials that have not been refused for so long were accepted: a request that is not answered by then has failed otherwise."""

VALID: Final = timedelta(minutes=10)
"""How long kopf may use what it has read. The kubelet rotates a token of an hour when 12 minutes of it are left."""


@dataclass(frozen=True)
class Refusals:
    """Refusals in a row, and the pause that follows from them. Times are seconds of a monotonic clock."""

    number: int = 0
    since: float = 0.0
    """When the first of them came."""
    given: float | None = None
    """When credentials were handed out last; None: not yet, or they have been refused."""

    def over(self, now: float) -> bool:
        """Whether the credentials that kopf has are known to be good, or nothing is known against them."""
        return self.number == 0 or (self.given is not None and now - self.given >= PROVEN_S)

    def another(self, now: float) -> Refusals:
        """One more; the first of a new row if the credentials had been good."""
        return Refusals(1, now) if self.over(now) else Refusals(self.number + 1, self.since)

    @property
    def pause_s(self) -> float:
        """Seconds until the same credentials are worth another try."""
        return PAUSES.delay(self.number, 0.0) if self.number else 0.0


class Login:
    """kopf's login handler."""

    def __init__(
        self,
        read: Callable[..., kopf.ConnectionInfo],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`read` is asked at every login, with kopf's arguments; `clock` is monotonic, `now` kopf's own."""
        self._read = read
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._last: kopf.ConnectionInfo | None = None
        self._refusals = Refusals()
        self._why = ""

    async def __call__(self, **kwargs: Any) -> kopf.ConnectionInfo:
        """Credentials that kopf has not had before, as soon as they are worth a try. Never fails: kopf would end, or wait unheard."""
        last, self._last = self._last, None
        if last is None or (last.expiration is not None and self._now() >= last.expiration):
            # Good to their end, so whatever was refused before is past.
            refused, self._refusals = None, Refusals()
        else:
            refused = last
            self._refuse("the API server refuses our credentials (401)")
        while True:
            try:
                read = self._read(**kwargs)
            except Exception as e:
                # Whatever is wrong with a file that somebody is writing: it is read again.
                self._refuse(f"no credentials: {type(e).__name__}: {e}")
            else:
                # Others than those which were refused are new: a rotated token.
                if refused is None or read != dataclasses.replace(refused, expiration=None):
                    break
            refused = None
            log.warning(
                "%s, %d times by now; the next try is in %.0f s", self._why, self._refusals.number, self._refusals.pause_s
            )
            await self._sleep(self._refusals.pause_s)
        self._last = dataclasses.replace(read, expiration=self._now() + VALID)
        self._refusals = dataclasses.replace(self._refusals, given=self._clock())
        return self._last

    def trouble(self) -> str | None:
        """Why kopf cannot ask the API server, or None."""
        now = self._clock()
        if self._refusals.over(now):
            return None
        return f"{self._why}, for {now - self._refusals.since:.0f} s now"

    def _refuse(self, why: str) -> None:
        self._refusals = self._refusals.another(self._clock())
        self._why = why


def source(kubeconfig: str | None) -> Callable[..., kopf.ConnectionInfo]:
    """Reads credentials for kopf, from where `Kube.connect` takes them; kopf itself reads the file's name from $KUBECONFIG.

    What it returns raises what is wrong with them: OSError, ValueError, and what a malformed kubeconfig makes of kopf.
    """

    def read(**kwargs: Any) -> kopf.ConnectionInfo:
        found = None if kubeconfig else service_account()
        found = found or kopf.login_with_kubeconfig(**kwargs)
        if found is None:
            raise ValueError("there is neither a service account nor a kubeconfig")
        return found

    return read


def service_account(directory: Path = SERVICE_ACCOUNT, env: Mapping[str, str] = os.environ) -> kopf.ConnectionInfo | None:
    """The pod's service account as it is now, or None outside of a pod. Raises OSError and ValueError where it is incomplete.

    The server's address is in the environment; its DNS name would be one thing more that may be away.
    """
    token, host, port = directory / "token", env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT")
    if not (host and port and token.exists()):
        return None
    text = token.read_text().strip()
    if not text:
        raise ValueError(f"{token} is empty")
    return kopf.ConnectionInfo(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}", ca_path=str(directory / "ca.crt"), token=text
    )
