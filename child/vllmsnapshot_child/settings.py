"""What init and server read from the environment alike."""

from __future__ import annotations

import os
from collections.abc import Callable


def seconds(name: str, default: float, log: Callable[[str], None]) -> float:
    """A duration from the environment; nonsense is reported and the default used (a typo must not keep a pod down)."""
    raw = os.environ.get(name, "")
    try:
        value = float(raw) if raw else default
    except ValueError:
        value = -1.0
    if 0 <= value <= 86400:
        return value
    log(f"{name}={raw!r} is not a number of seconds in 0..86400: using {default:g}")
    return default
