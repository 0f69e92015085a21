"""Every parser of what somebody else wrote: a value or its own error, never anything else. (The control files: test_protocol.py.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllmsnapshot.agent import facts
from vllmsnapshot.agent.containers import _depth, in_pod, parse_mountinfo, read_process
from vllmsnapshot.agent.criu import Log
from vllmsnapshot.agent.errors import StoreError
from vllmsnapshot.agent.identity import mapped_paths
from vllmsnapshot.agent.ledger import Entry
from vllmsnapshot.agent.local import _stored
from vllmsnapshot.agent.report import content_status
from vllmsnapshot.agent.store import MANIFEST_VERSION, Manifest
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.types import VLLMSnapshotContentStatus
from vllmsnapshot.world import Replica

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
GOOD: dict[str, Any] = {
    "version": MANIFEST_VERSION,
    "content": "c",
    "captured_at": "2027-01-01T00:00:00Z",
    "root_pid": 1001,
    "pids": [1001],
    "stdio": {"pipe:[1]": 1},
    "staged": {"shm": "/dev/shm"},
    "memory_bytes": 1,
    "disk_bytes": 1,
    "environment": {"kernelRelease": "6"},
    "mapped": [{"path": "/lib/x", "size": 1, "mtime_ns": 1, "image": True, "digest": None}],
    "files": {"images/x": {"size": 1, "digest": "d"}},
    "phases": {"criu": 1.0},
    "extra": {"content_uid": "u"},
}
fuzz = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(changes=st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, max_size=3))
def test_a_manifest_is_one_or_is_corrupt(changes: dict[str, Any]) -> None:
    try:
        manifest = Manifest.from_json(json.dumps({**GOOD, **changes}).encode())
    except StoreError:
        return
    # What was accepted can be worked with, up to the status of its content.
    assert max(manifest.pids) >= manifest.root_pid > 0
    assert all(isinstance(name, str) and item.size >= 0 for name, item in manifest.files.items())
    status = content_status(VLLMSnapshotContentStatus(), _stored(manifest), Entry(uid="u"), failed=None, lost=False, now=1.8e9)
    json.dumps(status.dump(), allow_nan=False)


@fuzz
@given(raw=st.binary(max_size=60) | JSON.map(lambda x: json.dumps(x).encode()))
def test_anything_else_is_no_manifest(raw: bytes) -> None:
    with pytest.raises(StoreError):
        Manifest.from_json(raw)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000])
def test_a_deep_manifest_is_corrupt(raw: bytes) -> None:
    with pytest.raises(StoreError):
        Manifest.from_json(raw)


@fuzz
@given(report=JSON | st.text(), settings_=JSON | st.text(), port=st.text())
def test_annotations_of_a_pod(report: Any, settings_: Any, port: str) -> None:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    annotations = {c.ANNOTATION_REPORT: text(report), c.ANNOTATION_SETTINGS: text(settings_), c.ANNOTATION_PORT: port}
    pod = {"metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotations}, "spec": {}, "status": {}}
    Replica.parse(pod)
    assert 1 <= facts.pod_facts(pod).port <= 65535
    facts.report_of(pod)


@fuzz
@given(comm=st.binary(max_size=40).filter(lambda x: b"\0" not in x))
def test_a_process_may_be_called_anything(comm: bytes, tmp_path: Path) -> None:
    directory = tmp_path / "7"
    directory.mkdir(exist_ok=True)
    (directory / "stat").write_bytes(b"7 (" + comm + b") S 1 " + b"0 " * 17 + b"42 0 0\n")
    # The kernel writes a line break in a name as \\n here.
    named = comm.replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    (directory / "status").write_bytes(b"Name:\t" + named + b"\nNSpid:\t7\t3\nNSsid:\t7\t3\nUid:\t0\t0\nGid:\t0\t0\n")
    process = read_process(tmp_path, 7)
    assert (process.pid, process.ppid, process.ns_pid, process.start_time) == (7, 1, 3, 42)
    assert process.comm.isprintable()


@fuzz
@given(stat=st.binary(max_size=80), status=st.binary(max_size=80))
def test_a_process_that_goes_away_half_way(stat: bytes, status: bytes, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir(exist_ok=True)
    (tmp_path / "7/stat").write_bytes(stat)
    (tmp_path / "7/status").write_bytes(status)
    with pytest.raises((OSError, ValueError)):
        read_process(tmp_path, 7)


NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=12)


@fuzz
@given(name=NAMES)
def test_a_mount_point_may_be_called_anything(name: str) -> None:
    escaped = "".join(f"\\{ord(x):03o}" if x in " \t\n\\" else x for x in name)
    other = "3 2 0:2 / /other rw - tmpfs tmpfs rw"
    mount, next_one = parse_mountinfo(f"1 2 0:1 /{escaped} /{escaped} rw - tmpfs tmpfs rw,size=1k\n{other}\n")
    assert (mount.point, mount.root, next_one.point) == (f"/{name}", f"/{name}", "/other")


@fuzz
@given(text=st.text(max_size=200))
def test_texts_of_the_kernel_are_looked_through_without_harm(text: str) -> None:
    in_pod(text, "uid")
    assert all(path.startswith("/") for path in mapped_paths(text))


@fuzz
@given(pieces=st.lists(st.binary(max_size=300), max_size=20))
def test_the_log_of_criu_may_be_anything(pieces: list[bytes]) -> None:
    log = Log(head=64, tail=64, notable=3)
    for piece in pieces:
        log.feed(piece)
    assert log.bytes == sum(map(len, pieces))
    assert len(log.errors()) < 4000
    assert len(log.text) < 1000


def test_a_process_does_not_pass_for_another_by_its_name(tmp_path: Path) -> None:
    """A line separator that is no line feed, and what looks like a field, fit into the fifteen bytes of a name."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text("0::/kubepods/poduid/x\n")
    (tmp_path / "7/status").write_bytes(b"Name:\tx\x0bNSpid:\t9\t1\nNSpid:\t7\t3\n")
    assert _depth(tmp_path, 7, "uid") == 0
    (tmp_path / "7/status").write_bytes(b"Name:\tx\nNSpid:\t7\t1\n")
    assert _depth(tmp_path, 7, "uid") == 2
