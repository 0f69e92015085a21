"""Log lines: keys that stay, what a line is about, and nothing of what a user calls secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agentbox import ROME, Box, NodeError
from vllmsnapshot import logs
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.kube import PODS
from vllmsnapshot.world import Claim

SECRET = "hf_abcdefghijklmnop"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the root logger writes; what it was before comes back."""
    root, ours = logging.getLogger(), logging.getLogger("vllmsnapshot")
    before = (root.handlers[:], root.level, ours.level)
    yield io.StringIO()
    root.handlers[:], root.level, ours.level = before
    logging.getLogger("vllmsnapshot").setLevel(before[2])


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_with_the_keys_that_are_documented(stream: io.StringIO) -> None:
    logs.configure("INFO", "json", stream=stream, component="agent", node="node-a")
    log = logging.getLogger("vllmsnapshot.agent")
    log.info('pod %s: "quoted"\nline', "a")
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("trouble")
    first, second = lines(stream)
    assert first == first | {
        "level": "info",
        "logger": "vllmsnapshot.agent",
        "msg": 'pod a: "quoted"\nline',
        "component": "agent",
    }
    assert first["ts"].endswith("Z")
    assert len(first["ts"]) == len("2027-01-15T08:00:00.000Z")
    assert "ValueError: wrong" in second["exception"]
    assert first.keys() | second.keys() <= logs.KEYS.keys()


def test_what_a_line_is_about_holds_within(stream: io.StringIO) -> None:
    logs.configure("INFO", "json", stream=stream, component="operator")
    log = logging.getLogger("vllmsnapshot.x")
    with logs.about(snapshot="ns/smol"):
        log.info("1")
        with logs.about(content="art"):
            log.info("2")
        log.info("3")
    log.info("4")
    about = [{key: line[key] for key in ("snapshot", "content") if key in line} for line in lines(stream)]
    assert about == [{"snapshot": "ns/smol"}, {"snapshot": "ns/smol", "content": "art"}, {"snapshot": "ns/smol"}, {}]


async def test_it_holds_in_the_agents_threads_too(stream: io.StringIO, tmp_path: Path) -> None:
    logs.configure("INFO", "json", stream=stream, component="agent")
    box = Box(tmp_path)
    with logs.about(pod="ns/a"):
        await box.node.thread(logging.getLogger("vllmsnapshot.x").info, "from a thread")
    assert [line["pod"] for line in lines(stream)] == ["ns/a"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_other_libraries_are_not_heard_below_warning(stream: io.StringIO, form: str) -> None:
    logs.configure("DEBUG", form, stream=stream)
    for name in ("kopf.objects", "kubernetes.client.rest", "aiohttp.client", "asyncio"):
        logging.getLogger(name).debug("response body: %s", SECRET)
        logging.getLogger(name).info("patching with %s", SECRET)
    logging.getLogger("vllmsnapshot.x").debug("ours")
    logging.getLogger("kopf.objects").warning("theirs")
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count("\n") == 2


async def test_values_of_environment_variables_are_not_logged(stream: io.StringIO, tmp_path: Path) -> None:
    """Through a replica's life with all its failures, everything written at DEBUG, reports and events included."""
    logs.configure("DEBUG", "json", stream=stream, component="agent")
    box = Box(tmp_path)

    def add(name: str) -> str:
        uid = box.add_pod(name)
        pod = box.kube.touch(box.kube.objects[PODS.plural, "default", name])
        pod["spec"]["containers"][0]["env"] += [
            {"name": "HF_TOKEN", "value": SECRET},
            {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ]
        box.sync()
        return uid

    first = add("a")
    box.add_content("art", "a")
    box.hello(first)
    await box.settle()
    box.ready(first)
    await box.settle()
    box.serving(first)
    await box.settle()
    for number, trouble in enumerate((NodeError(Reason.RESTORE_FAILED), OSError(28, "No space left on device"))):
        box.ops.broken["restore"] = trouble
        uid = add(f"b{number}")
        box.hello(uid)
        await box.settle()
    box.ops.broken.clear()
    box.kube.down = True
    box.hello(first, "i2")
    await box.settle()
    box.kube.down = False
    uid = add("wrong")
    box.hello(uid)
    await box.settle()
    box.serving(uid, oracle=ROME)
    await box.pods.settle(uid)
    await box.node.outbox.drain()
    assert "restore" in stream.getvalue()
    assert SECRET not in stream.getvalue()
    events = [obj for (kind, *_), obj in box.kube.objects.items() if kind == "events"]
    assert events
    assert SECRET not in json.dumps(events)


def test_a_spec_that_cannot_be_read_is_told_without_its_values() -> None:
    obj = {
        "metadata": {"namespace": "ns", "name": "smol", "uid": "u"},
        "spec": {"model": "m", "image": "i", "env": [{"name": "HF_TOKEN", "value": [SECRET]}]},
    }
    claim = Claim.parse(obj)
    assert "spec.env.0.value" in claim.invalid
    assert SECRET not in claim.invalid
