"""`artifacts`: what is stored where, in which state, and what nobody needs any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from rich.text import Text

from .. import eviction
from ..api import constants as c
from ..api.types import VerificationOutcome, VLLMSnapshotSpec, seconds
from ..environment import CPU_FLAGS
from ..objects import timestamp
from ..retention import doomed
from ..world import Content, Observed, Replica, recapture
from . import timeline
from .output import BAD, DOUBT, FAINT, GOOD, HEAD, Cell, Column, Row, age, plain, size, table, took

Object = dict[str, Any]

COLUMNS = (
    Column("NAME"),
    Column("SNAPSHOT", 3),
    Column("NODE", 2),
    Column("STATE"),
    Column("SIZE", 4),
    Column("CAPTURED", 5),
    Column("RESTORES", 6),
    Column("VERIFIED", 6),
    Column("IDENTITY", 8, wide=True),
    Column("REASON", 9, wide=True),
)


def state(item: Content) -> Cell:
    """One word, the most telling."""
    if item.evicted:
        return Cell(c.Reason.EVICTED, FAINT)
    if item.deleting:
        return Cell("Deleting", FAINT)
    if item.quarantined:
        return Cell(c.QUARANTINED, BAD)
    if item.failed:
        return Cell(c.FAILED, BAD)
    if item.slower:
        return Cell(c.SLOWER, DOUBT)
    return Cell(c.CAPTURED, GOOD) if item.captured else Cell("Ordered", DOUBT)


def verified(item: Content, now: float) -> Cell:
    """The last verification."""
    found = item.status.verification
    if found is None:
        return Cell("-")
    style = GOOD if found.outcome == VerificationOutcome.INTACT else BAD
    return Cell(f"{found.outcome} {age(timestamp(found.finished_at), now)} ago", style)


def row(item: Content, where: str, now: float) -> Row:
    """The cells of a content; `where`: namespace and name of its snapshot."""
    artifact, restores = item.status.artifact, item.status.restores
    return (
        item.name,
        where,
        item.node,
        state(item),
        size(artifact.bytes if artifact else None),
        age(item.captured_at, now) if item.captured else "-",
        f"{restores.succeeded} ok, {restores.failed} failed" if restores else "-",
        verified(item, now),
        item.identity[:12],
        ": ".join(filter(None, (item.reason, item.message))) if not item.captured or item.quarantined else item.slower or "-",
    )


def lines(
    contents: Sequence[Content],
    now: float,
    *,
    owners: Mapping[str, str] | None = None,
    snapshot: bool = True,
    width: int | None = None,
    wide: bool = False,
) -> list[Text]:
    """The table. `owners`: content name to its snapshot."""
    ordered = sorted(contents, key=lambda item: ((owners or {}).get(item.name, ""), item.node, -item.captured_at, item.name))
    rows = [row(item, (owners or {}).get(item.name, "-"), now) for item in ordered]
    if snapshot:
        return table(COLUMNS, rows, width=width, wide=wide)
    return table((COLUMNS[0], *COLUMNS[2:]), [(cells[0], *cells[2:]) for cells in rows], width=width, wide=wide)


def owner(obj: Object) -> str:
    """Namespace and name of the snapshot that a content belongs to."""
    ref = (obj.get("spec") or {}).get("snapshotRef") or {}
    return f"{ref.get('namespace', '?')}/{ref.get('name', '?')}"


def inspect(obj: Object, now: float, *, width: int | None = None) -> list[Text]:
    """Everything that is known of one content."""
    item, spec = Content.parse(obj), obj.get("spec") or {}
    status = item.status
    made = [
        _field("Name", item.name),
        _field("Snapshot", owner(obj)),
        _field("Node", item.node),
        _field("Source", f"pod {item.source or '-'}"),
        _field("Identity", item.identity),
    ]
    word = state(item)
    line = _field("State", "")
    line.append(" " * max(0, 14 - len(line)))
    line.append(word.text, style=word.style)
    if word.text == c.SLOWER:
        line.append(plain(f": {item.slower}"))
    elif item.reason and word.text != c.CAPTURED:
        line.append(plain(f": {item.reason}: {item.message}"))
    made.append(line)
    if status.artifact is not None:
        made += [
            _field("Size", f"{size(status.artifact.bytes)} ({status.artifact.bytes} bytes)"),
            _field("Captured", f"{status.artifact.captured_at} ({age(item.captured_at, now)} ago)"),
            _field("Digest", status.artifact.digest),
            *([_field("Cold start", status.artifact.cold_start)] if status.artifact.cold_start else []),
        ]
    if item.recapture:
        made.append(_field("Recapture", f"ordered for request {item.recapture}"))
    if status.restores is not None:
        counts = status.restores
        budget = f"{counts.consecutive_failures} in a row, budget {spec.get('failureBudget', 3)}"
        made.append(_field("Restores", f"{counts.succeeded} succeeded, {counts.failed} failed ({budget})"))
        if counts.last_failure:
            made.append(_field("", counts.last_failure))
    if status.verification is not None:
        found = status.verification
        detail = f": {found.message}" if found.message else f": {found.files} files, {size(found.bytes)}"
        made.append(_field("Verified", f"{found.outcome}{detail}, in {found.took}, {found.finished_at}"))
    phases = _phases(status.phases or {})
    if phases:
        made += [Text(), Text("Capture", style=HEAD)]
        longest = max(phases.values())
        for name, value in phases.items():
            label = Text(f"  {name:<18}{took(value):>9}  ")
            label.append(timeline.bar(0.0, value, longest, 30), style="cyan")
            label.rstrip()
            made.append(label)
    if status.environment:
        made += [Text(), Text("Environment at capture (a restore compares it)", style=HEAD)]
        made += [Text(plain(f"  {name:<22}{_fact(name, value)}")) for name, value in sorted(status.environment.items())]
    return made


def _fact(name: str, value: str) -> str:
    """A fact as a person wants it: nobody reads hundreds of flags."""
    return f"{len(value.split())} flags" if name == CPU_FLAGS else value


def _phases(found: Mapping[str, str]) -> dict[str, float]:
    made = {}
    for name, value in found.items():
        try:
            made[name.removesuffix("_s")] = seconds(value)
        except ValueError:
            continue
    return made


def _field(name: str, value: str) -> Text:
    line = Text(f"{name + ':' if name else '':<14}", style=HEAD)
    line.append(plain(value), style="not bold")
    line.rstrip()
    return line


# --- garbage ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Garbage:
    """A content that is not needed, why, and who removes it: the operator by itself, or only a person (`retained`)."""

    content: Content
    owner: str
    why: str
    retained: bool = False


def garbage(
    snapshots: Sequence[Object],
    contents: Sequence[Object],
    pods: Sequence[Object],
    nodes: Sequence[Object] | None,
    reports: Sequence[Object],
) -> list[Garbage]:
    """What is not needed of these contents, by the operator's own rule (`retention.doomed`), and what belongs to nobody.

    `snapshots` must be all that these contents may belong to: one that is missing counts as deleted. `nodes` is None where the
    caller may not list them: then those with an agent's report are known, and none is said to be gone.
    """
    names = frozenset(item["metadata"]["name"] for item in (reports if nodes is None else nodes))
    environments = {item["metadata"]["name"]: (item.get("status") or {}).get("environment") or {} for item in reports}
    by_claim: dict[str, list[Object]] = defaultdict(list)
    for item in contents:
        by_claim[((item.get("spec") or {}).get("snapshotRef") or {}).get("uid", "")].append(item)
    by_owner: dict[str, list[Replica]] = defaultdict(list)
    for pod in pods:
        for ref in pod["metadata"].get("ownerReferences") or []:
            if ref.get("controller"):
                by_owner[ref["uid"]].append(Replica.parse(pod))
    found: list[Garbage] = []
    for obj in snapshots:
        uid, identity = obj["metadata"]["uid"], (obj.get("status") or {}).get("identity") or ""
        mine = by_claim.pop(uid, [])
        try:
            spec = VLLMSnapshotSpec.model_validate(obj.get("spec") or {})
        except ValidationError:
            continue
        if not identity or "deletionTimestamp" in obj["metadata"]:
            continue  # the operator has not told yet what fits the spec; or all go, or are retained
        observed = Observed(
            pods=tuple(by_owner[uid]),
            contents=tuple(Content.parse(item) for item in mine),
            nodes=names,
            environments=environments,
            recapture=recapture(obj),
        )
        where = {item["metadata"]["name"]: owner(item) for item in mine}
        found += [Garbage(item, where[item.name], why) for item, why in doomed(spec, identity, observed)]
        found += [
            Garbage(item, where[item.name], f"node {item.node} does not exist any more")
            for item in observed.contents
            if nodes is not None and item.node not in names and not item.deleting
        ]
    for orphans in by_claim.values():
        for item in orphans:
            content = Content.parse(item)
            if not content.deleting:
                found.append(
                    Garbage(content, owner(item), "its snapshot was deleted, and artifact.deletionPolicy was Retain", True)
                )
    return sorted(found, key=lambda item: (item.owner, item.content.node, item.content.name))


GARBAGE_COLUMNS = (Column("NAME"), Column("SNAPSHOT", 2), Column("NODE", 1), Column("SIZE", 3), Column("WHY"))


def garbage_lines(found: Sequence[Garbage], *, width: int | None = None) -> list[Text]:
    """The table."""
    rows = [
        (
            item.content.name,
            item.owner,
            item.content.node,
            size(_bytes(item)),
            item.why + (" (--retained)" if item.retained else ""),
        )
        for item in found
    ]
    return table(GARBAGE_COLUMNS, rows, width=width)


def _bytes(item: Garbage) -> int | None:
    return item.content.status.artifact.bytes if item.content.status.artifact else None


# --- eviction --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Next:
    """An artifact that its node would evict if a capture needed the room; on each node the first goes first."""

    content: str
    owner: str
    node: str
    bytes: int
    why: str
    place: int


def next_to_go(contents: Sequence[Object], pods: Sequence[Object], reports: Sequence[Object]) -> list[Next]:
    """By the agents' own rule (`eviction.evictable`), in their order: what is broken, superseded or idle on its node.

    An agent knows a little more: which files are being read this moment. With the contents and pods of one namespace alone its
    artifacts are in their order all the same, only not among those of others.
    """
    environments = {item["metadata"]["name"]: (item.get("status") or {}).get("environment") or {} for item in reports}
    by_node: dict[str, list[Object]] = defaultdict(list)
    for item in contents:
        content = Content.parse(item)
        if (content.captured or content.quarantined) and not content.deleting:
            by_node[str(item["spec"]["nodeName"])].append(item)
    found = []
    for node, here in sorted(by_node.items()):
        owners = {str(item["metadata"]["name"]): owner(item) for item in here}
        made = [eviction.artifact(item, environments.get(node, {})) for item in here]
        ranked = eviction.evictable(made, eviction.uses(pods, node))
        found += [
            Next(item.content, owners[item.content], node, item.bytes, eviction.why(item, rank), place)
            for place, (item, rank) in enumerate(ranked, start=1)
        ]
    return found


NEXT_COLUMNS = (Column("NODE"), Column("GOES", 3), Column("NAME"), Column("SNAPSHOT", 2), Column("SIZE", 1), Column("WHY"))


def next_lines(found: Sequence[Next], *, width: int | None = None) -> list[Text]:
    """The table."""
    rows = [(item.node, str(item.place), item.content, item.owner, size(item.bytes), item.why) for item in found]
    return table(NEXT_COLUMNS, rows, width=width)
