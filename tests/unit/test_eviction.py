"""What goes first from a full store: what cannot be used, then what was replaced, then what lies idle; never what is in use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agentbox import NODE, content_object, pod_object
from vllmsnapshot.api import constants as c
from vllmsnapshot.eviction import Artifact, Standing, artifact, evictable, standing, uses, why

A, B = ("snap-a", "id-1"), ("snap-b", "id-1")


def one(content: str, use: tuple[str, str] = A, **changes: object) -> Artifact:
    return replace(Artifact(content=content, uid=f"uid-{content}", use=use, bytes=10, ordered=1.0, used=1.0), **changes)  # type: ignore[arg-type]


def names(items: list[Artifact], needed: set[tuple[str, str]] | None = None) -> list[str]:
    return [item.content for item, _ in evictable(items, needed or set())]


def test_least_useful_first() -> None:
    items = [
        one("idle-lately", ("snap-d", "id-1"), used=9.0),
        one("idle", B, used=5.0),
        one("old", ordered=1.0, used=8.0),
        one("new", ordered=2.0, used=8.5),
        one("damaged", ("snap-c", "id-1"), used=99.0, broken="quarantined"),
    ]
    assert names(items) == ["damaged", "old", "idle", "new", "idle-lately"]


def test_what_a_replica_on_the_node_would_restart_from_stays() -> None:
    items = [one("mine"), one("other", B)]
    assert names(items, {A}) == ["other"]
    assert names(items, {A, B}) == []


def test_of_two_of_one_identity_the_later_is_the_one_that_is_needed() -> None:
    items = [one("first", ordered=1.0, used=50.0), one("again", ordered=2.0)]
    assert names(items, {A}) == ["first"]
    # A later one that cannot be used replaces nothing.
    assert names([items[0], replace(items[1], broken="quarantined")], {A}) == ["again"]


def test_an_older_identity_with_replicas_is_not_superseded() -> None:
    """In a rollout both revisions serve: a crashed replica of the old one must come back as quickly."""
    items = [one("before", ("snap-a", "id-1"), ordered=1.0), one("after", ("snap-a", "id-2"), ordered=2.0)]
    assert names(items, {("snap-a", "id-1")}) == ["after"]
    assert names(items, {("snap-a", "id-2")}) == ["before"]


def test_a_damaged_artifact_is_nobodys_although_a_replica_has_its_identity() -> None:
    assert names([one("bad", broken="stale: kernelRelease was '1'")], {A}) == ["bad"]


def test_files_that_are_written_or_read_stay() -> None:
    assert names([one("busy", busy=True), one("bad", broken="quarantined", busy=True)]) == []


def test_the_words_say_why() -> None:
    bad, idle = one("bad", broken="quarantined"), one("idle")
    assert why(bad, standing(bad, [], ())) == "quarantined"
    assert "no replica" in why(idle, standing(idle, [], ()))


uses_of = st.sampled_from([("s1", "i1"), ("s1", "i2"), ("s2", "i1")])
artifacts = st.lists(
    st.builds(
        Artifact,
        content=st.text("abc", min_size=1, max_size=3),
        use=uses_of,
        bytes=st.integers(0, 9),
        ordered=st.integers(0, 3).map(float),
        used=st.integers(0, 3).map(float),
        broken=st.sampled_from(["", "", "quarantined"]),
        busy=st.booleans(),
    ),
    unique_by=lambda x: x.content,
    max_size=6,
)


@given(artifacts, st.sets(uses_of))
def test_whatever_is_evicted_a_replica_keeps_its_artifact(items: list[Artifact], needed: set[tuple[str, str]]) -> None:
    gone = {item.content for item, _ in evictable(items, needed)}
    for use in needed:
        usable = [x for x in items if x.use == use and not x.broken]
        if usable:
            assert max(usable, key=lambda x: (x.ordered, x.content)).content not in gone
    assert not gone & {x.content for x in items if x.busy}


@given(artifacts, st.sets(uses_of), st.randoms())
def test_the_order_does_not_depend_on_how_the_store_is_listed(
    items: list[Artifact], needed: set[tuple[str, str]], rng: object
) -> None:
    mixed = list(items)
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    assert names(mixed, needed) == names(items, needed)


# --- from API objects ------------------------------------------------------------------------------------------------


def test_an_artifact_out_of_its_content() -> None:
    obj = content_object("art", "a", captured=True)
    obj["metadata"]["creationTimestamp"] = "2027-01-15T08:00:00Z"
    obj["status"] |= {
        "artifact": {"bytes": 5, "digest": "sha256:1", "capturedAt": "2027-01-15T08:01:00Z"},
        "restores": {"succeeded": 1, "lastSucceededAt": "2027-01-15T09:00:00Z"},
        "environment": {"kernelRelease": "6.1"},
    }
    made = artifact(obj, {"kernelRelease": "6.1"})
    assert made == Artifact(
        content="art", uid="uid-art", use=("snap-1", "id-1"), bytes=5, ordered=1_800_000_000.0, used=1_800_003_600.0
    )
    assert artifact(obj, {"kernelRelease": "6.2"}).broken.startswith("stale: kernelRelease")
    assert artifact(obj, {}, size=7, used=2e9) == replace(made, bytes=7, used=2e9)


@pytest.mark.parametrize(("kind", "word"), [(c.QUARANTINED, "quarantined"), (c.FAILED, "failed")])
def test_what_may_not_be_restored_from_is_broken(kind: str, word: str) -> None:
    obj = content_object("art", "a", captured=True)
    obj["status"]["conditions"].append({"type": kind, "status": "True", "reason": "X", "message": ""})
    assert word in artifact(obj, {}).broken
    assert standing(artifact(obj, {}), [], {("snap-1", "id-1")}) == Standing.BROKEN


def test_an_open_order_is_busy_and_one_that_is_being_deleted_is_not() -> None:
    obj = content_object("art", "a")
    assert artifact(obj, {}).busy
    obj["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert not artifact(obj, {}).busy
    assert artifact(obj, {}).broken


def test_the_uses_of_a_node_are_those_of_its_replicas() -> None:
    here, elsewhere, over = pod_object("a"), pod_object("b", identity="id-2"), pod_object("c", identity="id-3")
    elsewhere["spec"]["nodeName"] = "node-2"
    over["status"]["phase"] = "Failed"
    assert uses([here, elsewhere, over], NODE) == {("snap-1", "id-1")}
