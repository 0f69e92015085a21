"""`status`: one line per snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from ..api import constants as c
from ..objects import condition, timestamp
from .output import BAD, DOUBT, FAINT, GOOD, Cell, Column, Row, age, size, table

Object = dict[str, Any]

COLUMNS = (
    Column("NAMESPACE", 0),
    Column("NAME"),
    Column("READY"),
    Column("RESTORED", 3),
    Column("COLD", 3),
    Column("SNAPSHOT", 2),
    Column("COLD START", 4),
    Column("RESTORE", 4),
    Column("SPEED-UP", 5),
    Column("STATE", 1),
    Column("AGE", 6),
    Column("NODE", 7, wide=True),
    Column("SIZE", 7, wide=True),
    Column("CONTENT", 8, wide=True),
    Column("IMAGE", 8, wide=True),
    Column("MESSAGE", 9, wide=True),
)


def state(obj: Object) -> Cell:
    """The condition that matters most."""
    for kind in (c.DEGRADED, c.STALE):
        found = condition(obj, kind)
        if found.get("status") == "True":
            return Cell(f"{kind}: {found.get('reason')}", BAD if kind == c.DEGRADED else DOUBT)
    ready, progressing = condition(obj, c.READY), condition(obj, c.PROGRESSING)
    if not ready:
        return Cell("not seen by the operator", DOUBT)
    meta, seen = obj["metadata"], (obj.get("status") or {}).get("observedGeneration") or 0
    if seen < (meta.get("generation") or 0):
        return Cell("changed, not seen by the operator yet", DOUBT)
    if "deletionTimestamp" in meta:
        return Cell("Deleting", FAINT)
    if ready.get("status") == "True" and progressing.get("status") != "True":
        return Cell(str(ready.get("reason")), GOOD)
    return Cell(str((progressing if ready.get("status") == "True" else ready).get("reason")), DOUBT)


def message(obj: Object) -> str:
    """What goes with the state."""
    for kind in (c.DEGRADED, c.STALE):
        found = condition(obj, kind)
        if found.get("status") == "True":
            return str(found.get("message"))
    return str(condition(obj, c.READY).get("message") or "")


def row(obj: Object, now: float) -> Row:
    """The cells of a snapshot."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    timings, record = status.get("timings") or {}, status.get("snapshot") or {}
    captured = condition(obj, c.SNAPSHOT_READY)
    up, wanted = status.get("readyReplicas") or 0, spec.get("replicas", 1)
    return (
        meta["namespace"],
        meta["name"],
        Cell(f"{up}/{wanted}", GOOD if up >= wanted else DOUBT),
        str(status.get("restoredReplicas") or 0),
        str(status.get("coldReplicas") or 0),
        Cell(str(captured.get("reason") or "-"), GOOD if captured.get("status") == "True" else DOUBT),
        timings.get("coldStart") or "-",
        timings.get("restoredStart") or "-",
        timings.get("speedup") or "-",
        state(obj),
        age(timestamp(meta.get("creationTimestamp")), now),
        record.get("node") or "-",
        size(record.get("bytes")),
        record.get("content") or "-",
        spec.get("image") or "-",
        message(obj),
    )


def lines(
    objects: Sequence[Object], now: float, *, namespaces: bool = False, width: int | None = None, wide: bool = False
) -> list[Text]:
    """The table, by namespace and name."""
    ordered = sorted(objects, key=lambda obj: (obj["metadata"]["namespace"], obj["metadata"]["name"]))
    first = 0 if namespaces else 1
    return table(COLUMNS[first:], [row(obj, now)[first:] for obj in ordered], width=width, wide=wide)
