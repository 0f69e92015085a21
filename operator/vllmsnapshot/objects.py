"""API objects as JSON, read the same way by whoever reads them: times, conditions, label values. Total: nonsense counts as absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Object = Mapping[str, Any]

HASH_CHARS = 40
"""160 bits of sha256, in hex: fits a label."""


def timestamp(text: Any) -> float:
    """An API time as seconds since the epoch; 0.0 for anything that is not one."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as an API time (whole seconds, UTC)."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time(seconds: float) -> str:
    """Seconds since the epoch as metav1.MicroTime, which events have."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def condition(obj: Object, kind: str) -> dict[str, Any]:
    """The condition of this type in an object's status; empty if there is none."""
    for item in (obj.get("status") or {}).get("conditions") or []:
        if isinstance(item, dict) and item.get("type") == kind:
            return dict(item)
    return {}


def is_true(obj: Object, kind: str) -> bool:
    """Whether the condition of this type is True."""
    return condition(obj, kind).get("status") == "True"


def digest(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_CHARS]


def label_value(name: str) -> str:
    """A name as a label value: itself, or where it is too long its head and a hash."""
    return name if len(name) <= 63 else f"{name[:46].rstrip('-.')}-{digest(name)[:16]}"
