"""Which request may fail: one that may have gone to a replica that was being killed, or for which no replica was there. Pure.

A graceful end (deleted, scaled down, rolled) is no excuse for a request to the Service: draining promises that none is cut. But it is
where kube-proxy has not been told of it, because the API server was away: its clients ask again after up to a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

LINGER_S: Final = 5.0
"""How long a request may have been on its way after the last look at kube-proxy's rules that still led it to the replica."""


@dataclass
class Window:
    """A time in which requests may fail, seconds of the monotonic clock."""

    snapshot: str
    uid: str
    """The pod; empty: no replica of the snapshot was ready."""
    why: str
    began: float
    ended: float = math.inf
    gentle: bool = False
    """A graceful end: excuses direct requests to the pod, and none to the Service."""
    death: int = 0
    """Where the pod stays, and serves again: which of its container's ends this is, counted from 1; 0: the pod does not stay."""


class Blame:
    """Remembers what was done to whom."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.windows: list[Window] = []
        self.outages: list[Window] = []
        """Times without a ready replica that nothing done here explains."""
        self._clock = clock
        self._deaths: dict[str, int] = {}
        """By pod: how often its container has ended, as far as the API has told."""
        self._calm = 0.0
        self._blind = 0.0

    def unsettle(self, seconds: float) -> None:
        """For so long from now nobody's readiness means anything: a kubelet that starts calls every pod not ready until it has probed it."""
        self._calm = self._clock() + seconds

    def blind(self, seconds: float) -> None:
        """For so long from now kube-proxy may not know of what ends: the API server was away."""
        self._blind = self._clock() + seconds

    def strike(self, snapshot: str, uid: str, why: str, *, gentle: bool = False, kill: bool = False) -> Window:
        """Something is about to be done to a pod. `kill`: to its container alone."""
        deaths = (self._deaths.get(uid, 0), *(window.death for window in self.windows if window.uid == uid))
        window = Window(snapshot, uid, why, self._clock(), gentle=gentle, death=max(deaths) + 1 if kill else 0)
        self.windows.append(window)
        return window

    def withdraw(self, window: Window) -> None:
        """It was not done. What was done to the pod before goes on."""
        self.windows.remove(window)

    def over(self, uid: str) -> None:
        """The pod is gone."""
        for window in self.windows:
            if window.uid == uid and window.ended == math.inf:
                window.ended = self._clock()

    def died(self, uid: str, deaths: int) -> None:
        """The API tells that the pod's container has ended so many times. A later kill than these is news that is still to come."""
        self._deaths[uid] = deaths
        for window in self.windows:
            if window.uid == uid and 0 < window.death <= deaths and window.ended == math.inf:
                window.ended = self._clock()

    def answered(self, uid: str, asked: float) -> None:
        """The pod has answered a request of this time: it serves again, also where no restart was ever told of."""
        for window in self.windows:
            if window.uid == uid and window.death and window.began < asked and window.ended == math.inf:
                window.ended = self._clock()

    def nobody(self, snapshot: str, *, wanted: int) -> None:
        """The last ready replica is gone, or kube-proxy routes to none."""
        now = self._clock()
        struck = any(w.uid and w.snapshot == snapshot and now <= w.ended + LINGER_S for w in self.windows)
        if wanted and not struck and now > max(self._calm, self._blind):
            self.outages.append(Window(snapshot, "", "no replica is ready", now))
            return
        self.windows.append(Window(snapshot, "", "no replica is ready", now))

    def somebody(self, snapshot: str) -> None:
        """A replica is ready again, and routed to."""
        for window in (*self.windows, *self.outages):
            if window.snapshot == snapshot and not window.uid and window.ended == math.inf:
                window.ended = self._clock()

    def still_routed(self, uid: str) -> None:
        """kube-proxy has a rule that leads to this pod, which does not serve."""
        now = self._clock()
        mine = [window for window in self.windows if window.uid == uid]
        for window in mine:
            _prolong(window, now)
        blamed = any(not window.gentle and now <= window.ended + LINGER_S for window in mine)
        gentle = next((window for window in mine if window.gentle and now <= window.ended + LINGER_S), None)
        if gentle is not None and not blamed and now < self._blind:
            self.windows.append(Window(gentle.snapshot, uid, "it ended before kube-proxy was told", gentle.began, now))

    def excuse(self, snapshot: str, began: float, ended: float, uid: str | None = None) -> str | None:
        """Why a request to the Service, or with `uid` to one replica, may have failed; None: it may not."""
        return next((window.why for window in self._excusing(snapshot, uid) if _met(window, began, ended)), None)

    def excusable_s(self, snapshot: str, began: float, ended: float) -> float:
        """For how many seconds of this time a failed request to the Service would have been excused."""
        total, reached = 0.0, began
        for window in sorted(self._excusing(snapshot, None), key=lambda x: x.began):
            first, last = max(reached, window.began), min(ended, window.ended + LINGER_S)
            total += max(0.0, last - first)
            reached = max(reached, last)
        return total

    def _excusing(self, snapshot: str, uid: str | None) -> Iterator[Window]:
        for window in self.windows:
            if window.snapshot == snapshot and (not window.gentle if uid is None else window.uid == uid):
                yield window


def _prolong(window: Window, now: float) -> None:
    """What has just ended has not ended yet. What ended longer ago has: its address may be another's by now."""
    if window.ended <= now <= window.ended + LINGER_S:
        window.ended = now


def _met(window: Window, began: float, ended: float) -> bool:
    return window.began <= ended and began <= window.ended + LINGER_S
