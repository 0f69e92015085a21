"""What the agent must remember of each content although the API server may be down: restores and why a capture failed.

One JSON file per content below the artifact store, written whole (fsync, rename) before the deed that it announces or
records. `status.restores` and the conditions of the content are copies of it. An entry has the key (pod, incarnation), so that
recording the same thing twice changes nothing.

One more file holds how much restores on this node moved in which time: it belongs to the node and outlives the contents.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from ..api.constants import Reason

log = logging.getLogger(__name__)

Outcome = Literal["pending", "succeeded", "failed", "aborted"]

KEEP = 64
"""Finished restores remembered per content; the counts do not depend on them."""

SPEEDS = "_restores.json"
"""File of the node's own figures. No content can be called so: names of objects do not start with an underscore."""

SPEEDS_KEPT = 16
"""Restores that count for the node's throughput: enough to even out one that met another load, few enough to follow a new disk."""

QUARANTINE_AT_ONCE = (Reason.CANARY_MISMATCH, Reason.ARTIFACT_CORRUPT, Reason.IDENTITY_MISMATCH)
"""Failures that prove that the artifact cannot be used: no second try. The last is found by comparing files, layers and facts, and
the same comparison gives the same answer: the replica that met it is captured anew instead of the third one after it."""

NOT_THE_ARTIFACT = (
    Reason.INSUFFICIENT_MEMORY,
    Reason.INSUFFICIENT_DISK,
    Reason.INSUFFICIENT_GPU_MEMORY,
    Reason.GPU_UNAVAILABLE,
    Reason.NODE_NOT_CAPABLE,
    Reason.AGENT_RESTARTED,
    Reason.SOURCE_GONE,
    Reason.STORE_FAILED,
    Reason.ENGINE_RUNNING,
)
"""Failures of the place or the moment: they are not counted against the artifact."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One restore from a content. `pending` from before CRIU is started until the replica is verified or has failed."""

    pod: str
    incarnation: str
    outcome: Outcome = "pending"
    reason: str = ""
    message: str = ""
    at: float = 0.0
    seconds: float = 0.0
    """From `at` until the replica served; 0 where it did not, or was not measured."""
    alone: bool = False
    """No other restore of this node was under way at any time of this one."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """A reason and a message."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """All that is remembered of one content (of this UID: a recreated one of the same name starts from nothing)."""

    uid: str
    attempts: tuple[Attempt, ...] = ()
    succeeded: int = 0
    failed: int = 0
    consecutive: int = 0
    last_failure: str = ""
    quarantined: Why | None = None
    capture_failed: Why | None = None

    @property
    def last_succeeded_at(self) -> float:
        """When the last restore of those remembered that succeeded was begun (seconds since the epoch); 0.0 if none did."""
        return max((a.at for a in self.attempts if a.outcome == "succeeded"), default=0.0)


@dataclass
class Ledger:
    """The entries of this node. Safe to use from several threads.

    `wrote` is called after every durable write, `settled` with outcome and reason of every restore that has ended, once.
    """

    directory: str
    wrote: Callable[[str], None] = lambda _: None
    settled: Callable[[str, str], None] = lambda _outcome, _reason: None
    _entries: dict[str, Entry] = field(default_factory=dict)
    _unsaved: set[str] = field(default_factory=set)  # contents whose entry the disk refused
    _speeds: tuple[tuple[int, float], ...] = ()  # bytes and seconds of the last restores, oldest first
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def load(self) -> None:
        """Read what an agent before us wrote. A file that cannot be read is as good as none: the status still has the counts."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        for file in os.listdir(self.directory):
            path = os.path.join(self.directory, file)
            if file == SPEEDS:
                self._speeds = _read_speeds(path)
                continue
            if not file.endswith(".json"):
                with contextlib.suppress(OSError):
                    os.unlink(path)  # a half-written temporary
                continue
            try:
                with open(path, encoding="utf-8") as f:
                    raw = json.load(f)
                self._entries[file.removesuffix(".json")] = _entry(raw)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
                log.warning("%s cannot be read: what it remembered is lost", path, exc_info=True)

    def entry(self, content: str, uid: str) -> Entry:
        """What is known of this content."""
        found = self._entries.get(content)
        return found if found is not None and found.uid == uid else Entry(uid=uid)

    def known(self, content: str, uid: str) -> bool:
        """Whether there is an entry at all."""
        found = self._entries.get(content)
        return found is not None and found.uid == uid

    def contents(self) -> tuple[str, ...]:
        """Names of all contents that have an entry."""
        return tuple(self._entries)

    def put(self, content: str, entry: Entry) -> None:
        """Store an entry durably. Raises OSError if the disk refuses; memory is right even then, and `save` tries again."""
        with self._lock:
            if self._entries.get(content) == entry and content not in self._unsaved:
                return
            self._entries[content] = entry
            self._unsaved.add(content)
            self._write(content, entry)
        self.wrote(f"ledger {content}")

    def save(self) -> None:
        """Write what the disk has refused before, and remove what it would not remove. Raises OSError if it still refuses."""
        with self._lock:
            for name in os.listdir(self.directory):
                if name.endswith(".tmp"):
                    os.unlink(os.path.join(self.directory, name))
            for content in sorted(self._unsaved):
                self._write(content, self._entries[content])
                self.wrote(f"ledger {content}")

    def _write(self, content: str, entry: Entry) -> None:
        self._store(f"{content}.json", asdict(entry))
        self._unsaved.discard(content)

    def _store(self, name: str, value: Any) -> None:
        tmp = os.path.join(self.directory, f".{secrets.token_hex(6)}.tmp")
        try:
            with open(tmp, "w", encoding="utf-8") as f:
                json.dump(value, f)
                f.flush()
                os.fsync(f.fileno())
            os.rename(tmp, os.path.join(self.directory, name))
        except OSError:
            # A full disk refuses again and again: nothing may pile up.
            with contextlib.suppress(OSError):
                os.unlink(tmp)
            raise
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def adopt(self, content: str, uid: str, *, succeeded: int, failed: int, consecutive: int, last_failure: str) -> None:
        """Go on from the counts in a content's status, where the disk remembers nothing of it (a store that was replaced)."""
        with self._lock:
            if not self.known(content, uid):
                self.put(
                    content,
                    Entry(uid=uid, succeeded=succeeded, failed=failed, consecutive=consecutive, last_failure=last_failure),
                )

    def forget(self, content: str) -> None:
        """Remove an entry whose content is gone."""
        with self._lock:
            self._entries.pop(content, None)
            self._unsaved.discard(content)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, f"{content}.json"))

    # --- the node's throughput ---

    def moved(self, size: int, seconds: float) -> None:
        """Note a restore that put a tree back: bytes of memory, and seconds from the first to the last of them. Raises OSError."""
        if size <= 0 or not 0 < seconds < 86400:
            return
        with self._lock:
            self._speeds = (*self._speeds, (size, round(seconds, 4)))[-SPEEDS_KEPT:]
            self._store(SPEEDS, self._speeds)

    def restore_bytes_per_s(self) -> int | None:
        """What the last restores moved, all together; None if there was none.

        The fixed costs of a restore are in it, so where only small artifacts were restored it says less than the disk can do.
        """
        speeds = self._speeds
        return round(sum(size for size, _ in speeds) / sum(seconds for _, seconds in speeds)) if speeds else None

    # --- restores ---

    def begin(self, content: str, uid: str, pod: str, incarnation: str, now: float) -> None:
        """Announce a restore, before anything is done in the container."""
        with self._lock:
            entry = self.entry(content, uid)
            if any(a.pod == pod and a.incarnation == incarnation for a in entry.attempts):
                return
            alone = not any(a.outcome == "pending" for x in self._entries.values() for a in x.attempts)
            attempt = Attempt(pod=pod, incarnation=incarnation, at=now, alone=alone)
            self.put(content, replace(entry, attempts=(*entry.attempts, attempt)))

    def settle(
        self,
        content: str,
        pod: str,
        incarnation: str,
        outcome: Outcome,
        reason: str = "",
        message: str = "",
        *,
        budget: int = 3,
        seconds: float = 0.0,
    ) -> bool:
        """Record how a pending restore ended, and after how many seconds; False if it was settled before or never begun.

        A counted failure quarantines the content once `budget` of them came in a row, and at once if it proves the artifact bad.
        """
        with self._lock:
            entry = self._entries.get(content)
            if entry is None:
                return False
            i = next(
                (i for i, a in enumerate(entry.attempts) if (a.pod, a.incarnation, a.outcome) == (pod, incarnation, "pending")),
                None,
            )
            if i is None:
                return False
            mine = entry.attempts[i]
            others = (a for x in self._entries.values() for a in x.attempts if a is not mine)
            alone = mine.alone and all(a.at < mine.at for a in others)
            done = replace(mine, outcome=outcome, reason=reason, message=message[:1000], seconds=seconds, alone=alone)
            attempts = [*entry.attempts[:i], *entry.attempts[i + 1 :], done]
            finished = [a for a in attempts if a.outcome != "pending"][-KEEP:]
            entry = replace(entry, attempts=tuple(a for a in attempts if a.outcome == "pending" or a in finished))
            if outcome == "succeeded":
                entry = replace(entry, succeeded=entry.succeeded + 1, consecutive=0)
            elif outcome == "failed" and reason not in NOT_THE_ARTIFACT:
                entry = replace(
                    entry,
                    failed=entry.failed + 1,
                    consecutive=entry.consecutive + 1,
                    last_failure=f"{reason}: {message}"[:1000],
                )
                if reason in QUARANTINE_AT_ONCE:
                    entry = _quarantined(entry, reason, message)
                elif entry.consecutive >= budget:
                    entry = _quarantined(
                        entry,
                        Reason.FAILURE_BUDGET_SPENT,
                        f"{entry.consecutive} failed in a row, the last with {reason}: {message}",
                    )
            # Before the write: memory has the end of this restore even if the disk refuses it.
            self.settled(outcome, reason)
            self.put(content, entry)
            return True

    def quarantine(self, content: str, uid: str, reason: str, message: str) -> None:
        """Mark a content as not to be restored from any more."""
        with self._lock:
            self.put(content, _quarantined(self.entry(content, uid), reason, message))

    def capture_failed(self, content: str, uid: str, reason: str, message: str) -> None:
        """Note why an order cannot be fulfilled; the first reason stays."""
        with self._lock:
            entry = self.entry(content, uid)
            if entry.capture_failed is None:
                self.put(content, replace(entry, capture_failed=Why(reason=reason, message=message[:1000])))

    def attempts(self, pod: str) -> list[tuple[str, Attempt]]:
        """All remembered restores of a pod, oldest first."""
        found = [(content, a) for content, entry in list(self._entries.items()) for a in entry.attempts if a.pod == pod]
        return sorted(found, key=lambda item: item[1].at)

    def blocked(self, pod: str) -> dict[str, str]:
        """Contents that this pod failed to come up from, with no success of any pod since: it must not try for ever."""
        out: dict[str, str] = {}
        for content, entry in list(self._entries.items()):
            for attempt in entry.attempts:
                if attempt.outcome == "succeeded":
                    out.pop(content, None)
                elif attempt.outcome == "failed" and attempt.pod == pod:
                    out[content] = f"{attempt.reason}: {attempt.message}"
        return out

    def drop_pod(self, pod: str) -> None:
        """The pod is gone: a restore that was pending in it is nobody's failure."""
        for content, attempt in self.attempts(pod):
            if attempt.outcome == "pending":
                self.settle(content, pod, attempt.incarnation, "aborted", Reason.SOURCE_GONE, "the pod was deleted")


def _entry(raw: dict[str, Any]) -> Entry:
    """An entry out of its file. What a newer agent has added is left out; its quarantines and counts are kept."""
    known = {f.name for f in fields(Entry)}
    values = {k: v for k, v in raw.items() if k in known}
    values["attempts"] = tuple(Attempt(**{k: v for k, v in a.items() if k in _ATTEMPT}) for a in raw["attempts"])
    for name in ("quarantined", "capture_failed"):
        values[name] = Why(reason=str(raw[name]["reason"]), message=str(raw[name]["message"])) if raw.get(name) else None
    entry = Entry(**values)
    numbers = (entry.succeeded, entry.failed, entry.consecutive)
    times = (x for a in entry.attempts for x in (a.at, a.seconds))
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(type(x) in (int, float) for x in times):
        raise ValueError("a number is none")
    return entry


_ATTEMPT = frozenset(f.name for f in fields(Attempt))


def _read_speeds(path: str) -> tuple[tuple[int, float], ...]:
    try:
        with open(path, encoding="utf-8") as f:
            speeds = tuple((int(size), float(seconds)) for size, seconds in json.load(f))
    except (OSError, ValueError, TypeError, RecursionError):
        return ()
    return tuple(x for x in speeds if x[0] > 0 and 0 < x[1] < 86400)[-SPEEDS_KEPT:]


def _quarantined(entry: Entry, reason: str, message: str) -> Entry:
    return entry if entry.quarantined else replace(entry, quarantined=Why(reason=reason, message=message[:1000]))
