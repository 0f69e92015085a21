"""Logging of operator and agent: text for people, or one JSON object per line with keys that stay.

What a line is about (a snapshot, a pod, a content) is a key of its own where the code says so by `about`: it holds for everything
that is called within, threads of the agent's pool included. Other libraries are heard from WARNING on only: at lower levels some
print what they send, and that may hold the values of environment variables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

KEYS = {
    "ts": "time in UTC with milliseconds (RFC 3339)",
    "level": "`debug`, `info`, `warning`, `error`, `critical`",
    "logger": "Python module",
    "msg": "what happened",
    "component": "`operator` or `agent`",
    "node": "node of the agent",
    "snapshot": "`namespace/name` of the VLLMSnapshot that is worked on",
    "pod": "`namespace/name` of the pod that is worked on",
    "content": "name of the VLLMSnapshotContent that is worked on",
    "exception": "traceback, where there is one",
}
"""Keys of a JSON line. The first five are always there."""

_about: ContextVar[dict[str, str]] = ContextVar("about", default={})  # noqa: B039 - never changed in place


@contextlib.contextmanager
def about(**what: str) -> Iterator[None]:
    """Lines logged within are about this (keys of KEYS)."""
    token = _about.set({**_about.get(), **what})
    try:
        yield
    finally:
        _about.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `constant` is part of each."""

    def __init__(self, **constant: str) -> None:
        super().__init__()
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, str] = {
            "ts": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **self._constant,
            **_about.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, form: str, *, stream: TextIO | None = None, **constant: str) -> None:
    """Log to standard error: our own loggers from `level` on, `form` is `text` or `json`. `constant`: keys of every JSON line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter(**constant) if form == "json" else text)
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelName(level)), handlers=[handler], force=True)
    logging.getLogger("vllmsnapshot").setLevel(level)
