"""The logs of operator and agents, of containers and pods too that are long gone: the kubelet removes them, so they are copied as they
grow."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final, Self, TextIO

from tests.system import SYSTEM_NAMESPACE

PAUSE_S: Final = 0.2
_RECORD: Final = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ([A-Z]+) +(\S+) (.*)")

ALLOWED: Final = (
    (r"kopf\._cogs\.clients\.watching Request attempt", "kopf calls each try an error while the API server is away"),
    (r"vllmsnapshot\.agent\.node the ledger of \S+ cannot be written", "the disk is full; memory has it until it is freed"),
)
"""Errors that may be logged (regular expression over logger and message), each with the reason."""


class LogKeeper:
    """Copies every line of the system's containers into one file, for the length of a block."""

    def __init__(self, directory: Path, copy: Path) -> None:
        """`directory`: the kubelet's log directory of pods."""
        self._directory = directory
        self.copy = copy
        self._open: dict[tuple[int, int], tuple[TextIO, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._out: TextIO | None = None

    async def __aenter__(self) -> Self:
        self.copy.parent.mkdir(parents=True, exist_ok=True)
        self._out = self.copy.open("w")
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        assert self._out is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.copy_new()
        self._out.close()
        for file, _name in self._open.values():
            file.close()

    async def _follow(self) -> None:
        while True:
            self.copy_new()
            await asyncio.sleep(PAUSE_S)

    def copy_new(self) -> None:
        """Copy what has been written since."""
        assert self._out is not None
        for path in self._directory.glob(f"{SYSTEM_NAMESPACE}_*/*/*.log"):
            with contextlib.suppress(OSError):
                info = path.stat()
                key = info.st_dev, info.st_ino
                if key not in self._open:
                    name = f"{path.parent.parent.name.split('_')[1]}/{path.stem}"
                    # Held open, it can be read to its end after it was removed.
                    self._open[key] = path.open(errors="replace"), name
        for file, name in self._open.values():
            for line in file:
                # Container runtime's format: time, stream, F for a full line, text.
                self._out.write(f"{name} {line.rstrip().split(' ', 3)[-1]}\n")
        self._out.flush()

    def verdict(self) -> tuple[list[str], dict[str, Any]]:
        """Errors that are not allowed, and how often what was warned of or allowed."""
        errors: Counter[str] = Counter()
        told: Counter[str] = Counter()
        levels: dict[str, bool] = {}
        """By container: whether its last record was one of the levels that explain a traceback below it."""
        for container, _, text in (line.partition(" ") for line in self.copy.read_text().splitlines()):
            found = _RECORD.match(text)
            if found:
                level, logger, message = found.groups()
                levels[container] = level in ("WARNING", "ERROR", "CRITICAL")
                key = _general(f"{level} {logger} {message}")
                if level == "WARNING" or any(re.search(pattern, f"{logger} {message}") for pattern, _ in ALLOWED):
                    told[key] += 1
                elif levels[container]:
                    errors[key] += 1
            elif text.startswith("Traceback (most recent call last)") and not levels.get(container):
                errors["a traceback of no record"] += 1
        return [f"{key} ({number} times)" for key, number in errors.most_common()], dict(told.most_common(40))


def _general(text: str) -> str:
    """Without what differs each time: names with numbers, hashes, addresses."""
    return re.sub(r"[0-9a-f]{6,}|\d+", "N", text)[:200]
