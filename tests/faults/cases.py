"""Which cases a suite tries, and what became of them: every one is tried, whatever became of the others.

FULL=1 takes every point; otherwise a part of them, a different one each day (the seed is printed; SEED=N repeats). With CI set it is always
the same: whether a change may go in must not depend on the day.
"""

from __future__ import annotations

import datetime
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable

FULL = bool(os.environ.get("FULL"))
SEED = int(os.environ.get("SEED") or ("1" if os.environ.get("CI") else datetime.date.today().toordinal()))
SAMPLE = int(os.environ.get("SAMPLE", "3"))
"""Points of each kind that are tried without FULL."""


def chosen(points: list[str], what: str, fitting: Callable[[str], bool] = lambda _: True) -> list[int]:
    """Which points are tried, by number from 1 on. `what`: each suite tries others."""
    every = [n for n, name in enumerate(points, start=1) if fitting(name)]
    if FULL or len(every) <= SAMPLE:
        return every
    return sorted(random.Random(f"{SEED} {what}").sample(every, SAMPLE))


class Cases:
    """What was tried, by suite. An enumeration that found nothing to cut would pass too, so it is counted."""

    def __init__(self) -> None:
        self.points: dict[str, int] = {}
        """Of an undisturbed life, by process."""
        self.tried: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def each(self, suite: str, numbers: Iterable[int], one: Callable[[int], str]) -> None:
        """`one(number)` is a case: it returns what was hit, and raises AssertionError. Raises AssertionError with all that failed."""
        problems = []
        for n in numbers:
            self.tried[suite] += 1
            try:
                hit = one(n)
                assert hit, "nothing was hit"
            except Exception as e:
                self.failed[suite] += 1
                problems.append(f"{n}: {type(e).__name__}: {e}")
        assert self.tried[suite], f"{suite}: there are none"
        assert not problems, "\n".join([f"SEED={SEED} {suite}: {len(problems)} of {self.tried[suite]} failed", *problems])

    def lines(self) -> list[str]:
        """For people."""
        return [
            *(f"{count:6d}  points in an undisturbed life of {who}" for who, count in sorted(self.points.items())),
            *(f"{count:6d}  {suite}; failures: {self.failed[suite]}" for suite, count in sorted(self.tried.items())),
            f"{self.tried.total():6d}  cases in all; failures: {self.failed.total()}",
        ]


CASES = Cases()
