"""The small parts of the agent: inotify, outbox, cache, slots, ledger, configuration, the HTTP canary."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.agentbox import ScriptedOps
from vllmsnapshot.agent import config, restore
from vllmsnapshot.agent.accelerator import Cpu
from vllmsnapshot.agent.app import REFUSED_S, Agent, Loop
from vllmsnapshot.agent.cache import Cache
from vllmsnapshot.agent.canary import Canary
from vllmsnapshot.agent.containers import Container, Process
from vllmsnapshot.agent.ledger import KEEP, SPEEDS, SPEEDS_KEPT, Ledger
from vllmsnapshot.agent.outbox import Outbox
from vllmsnapshot.agent.slots import Slots
from vllmsnapshot.agent.store import Manifest
from vllmsnapshot.agent.watcher import Watcher
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.kube import PODS, ApiError, Kube, WatchEvent

# --- inotify ---------------------------------------------------------------------------------------------------------


class Woken:
    """Collects wake-ups; `next` waits for one."""

    def __init__(self) -> None:
        self.uids: asyncio.Queue[str] = asyncio.Queue()

    async def next(self) -> str:
        async with asyncio.timeout(30):
            return await self.uids.get()

    def clear(self) -> None:
        while not self.uids.empty():
            self.uids.get_nowait()


@pytest.fixture
async def woken() -> Woken:
    return Woken()


@pytest.fixture
async def watcher(woken: Woken) -> AsyncIterator[Watcher]:
    watcher = Watcher(woken.uids.put_nowait)
    watcher.start()
    yield watcher
    watcher.stop()


async def test_a_file_in_the_control_volume_wakes(watcher: Watcher, woken: Woken, tmp_path: Path) -> None:
    target = tmp_path / "control"
    target.mkdir()
    watcher.add("a", str(target))
    assert watcher.settled("a")
    (target / ".hello.json.tmp").write_text("{}")
    (target / ".hello.json.tmp").rename(target / "hello.json")
    assert await woken.next() == "a"
    # One wake-up, for the name that counts: the temporary file is nobody's news.
    assert woken.uids.empty()


async def test_the_watch_moves_down_as_the_directories_are_made(watcher: Watcher, woken: Woken, tmp_path: Path) -> None:
    target = tmp_path / "pods" / "uid" / "volumes" / "control"
    watcher.add("a", str(target))
    assert not watcher.settled("a")
    for directory in (*reversed(target.parents), target):
        directory.mkdir(exist_ok=True)
        await asyncio.sleep(0)
    while not watcher.settled("a"):
        await woken.next()
    woken.clear()
    (target / "hello.json").write_text("{}")
    assert await woken.next() == "a"


async def test_all_directories_made_at_once_lose_nothing(watcher: Watcher, woken: Woken, tmp_path: Path) -> None:
    target = tmp_path / "pods" / "uid" / "volumes" / "control"
    watcher.add("a", str(target))
    target.mkdir(parents=True)
    (target / "hello.json").write_text("{}")
    # The file may be older than the watch: the wake-up at settling is what makes up for it.
    assert await woken.next() == "a"
    assert watcher.settled("a")


async def test_a_volume_that_is_removed_and_made_again(watcher: Watcher, woken: Woken, tmp_path: Path) -> None:
    target = tmp_path / "control"
    target.mkdir()
    watcher.add("a", str(target))
    target.rmdir()
    await woken.next()
    assert not watcher.settled("a")
    target.mkdir()
    while not watcher.settled("a"):
        await woken.next()


async def test_pods_do_not_wake_each_other(watcher: Watcher, woken: Woken, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        watcher.add(name, str(tmp_path / name))
    watcher.remove("c")
    (tmp_path / "c" / "x").write_text("")
    (tmp_path / "b" / "x").write_text("")
    assert await woken.next() == "b"
    assert woken.uids.empty()


async def test_a_symlink_on_the_way_is_not_followed(watcher: Watcher, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "control").symlink_to(tmp_path / "elsewhere")
    watcher.add("a", str(tmp_path / "control"))
    assert not watcher.settled("a")


# --- loop ------------------------------------------------------------------------------------------------------------


async def test_a_key_is_worked_on_once_at_a_time_and_again_after_a_wake() -> None:
    running, runs, gate, done = [0], [0], asyncio.Event(), asyncio.Event()

    async def settle(_key: str) -> float | None:
        running[0] += 1
        assert running[0] == 1
        runs[0] += 1
        await gate.wait()
        running[0] -= 1
        if runs[0] == 2:
            done.set()
        return None

    loop = Loop(settle, 3600.0, lambda _: True)
    for _ in range(5):
        loop.wake("a")
    await asyncio.sleep(0)
    loop.wake("a")
    gate.set()
    async with asyncio.timeout(30):
        await done.wait()
    await loop.stop(5)
    assert runs == [2]
    loop.wake("a")
    await asyncio.sleep(0)
    assert runs == [2]


async def test_an_error_is_tried_again() -> None:
    tries: asyncio.Queue[int] = asyncio.Queue()

    async def settle(_key: str) -> float | None:
        tries.put_nowait(1)
        raise ApiError(503, "x", "y", retry_after_s=0.001)

    loop = Loop(settle, 3600.0, lambda _: True)
    loop.wake("a")
    async with asyncio.timeout(30):
        for _ in range(3):
            await tries.get()
    await loop.stop(5)


# --- outbox ----------------------------------------------------------------------------------------------------------


async def test_only_the_newest_message_is_written() -> None:
    box, written, gate = Outbox(retry_s=0.001), [], asyncio.Event()

    def message(text: str) -> Any:
        async def send() -> None:
            await gate.wait()
            written.append(text)

        return send

    box.post("k", message("1"))
    await asyncio.sleep(0)
    box.post("k", message("2"))
    box.post("k", message("3"))
    assert box.waits("k")
    gate.set()
    await box.drain()
    assert written == ["1", "3"]
    assert not box.waits("k")


@pytest.mark.parametrize(
    ("status", "tries", "calls"), [(500, None, 3), (0, None, 3), (401, None, 3), (404, None, 1), (403, 5, 1), (500, 2, 2)]
)
async def test_what_is_tried_again(status: int, tries: int | None, calls: int) -> None:
    box, called = Outbox(retry_s=0.001), []

    async def send() -> None:
        called.append(1)
        if len(called) < 3:
            raise ApiError(status, "x", "y")

    box.post("k", send, tries=tries)
    await box.drain()
    assert len(called) == calls


# --- cache, slots ----------------------------------------------------------------------------------------------------


def obj(uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": uid, "resourceVersion": str(version)}}


def test_an_older_event_never_replaces_a_newer_version_but_a_list_does() -> None:
    changed: list[str] = []
    cache = Cache(PODS, lambda x: str(x["metadata"]["uid"]), changed.append)
    cache._sync([obj("a", 5), obj("b", 5)])
    assert cache.put(obj("a", 7))
    assert not cache.put(obj("a", 6))
    cache._sync([obj("a", 7)])
    assert changed == ["a", "b", "b"]
    cache._sync([obj("a", 3)])
    assert cache.get("a") == obj("a", 3)
    assert changed == ["a", "b", "b", "a"]
    assert list(cache) == ["a"]


async def test_a_watch_that_is_refused_is_pending_work(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An API server that has just been started answers 401 for a moment; one that lasts is in the log, and what is known stays."""

    class Refusing:
        tries = 0

        async def watch(self, *_: Any, **__: Any) -> AsyncIterator[WatchEvent]:
            self.tries += 1
            if self.tries in (2, 3):
                raise ApiError(401, "Unauthorized", "Unauthorized")
            yield WatchEvent("SYNC", {}, (obj("a", self.tries),))
            if self.tries == 4:
                await asyncio.Event().wait()

    monkeypatch.setattr("vllmsnapshot.agent.cache.RETRY_S", 0.0)
    changed: asyncio.Queue[str] = asyncio.Queue()
    cache = Cache(PODS, lambda x: str(x["metadata"]["uid"]), changed.put_nowait)
    task = asyncio.create_task(cache.follow(cast(Any, Refusing()), labels=""))
    async with asyncio.timeout(30):
        assert [await changed.get(), await changed.get()] == ["a", "a"]
    assert cache.get("a") == obj("a", 4)
    assert [x for x in caplog.messages if "401" in x] == ["watch of pods: 401 Unauthorized: Unauthorized"] * 2
    task.cancel()


async def test_an_agent_that_is_refused_for_long_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator then answers for the node's replicas. Not at once: an API server that has just been started refuses, too."""
    (tmp_path / "pods").mkdir()
    kube = Kube(cast(Any, None))
    settings = config.Config(node_name="n", kubelet_dir=str(tmp_path), store_dir=str(tmp_path / "store"))
    agent = Agent(settings, ScriptedOps(lambda _: None), kube, cast(Any, None))
    agent._examined = True
    agent.node.pods.synced.set()
    agent.node.contents.synced.set()
    assert agent.ready
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kube.refused_since = 1000.0
    now[0] += REFUSED_S
    assert agent.ready
    now[0] += 0.1
    answer = await agent._readyz(cast(Any, None))
    assert (answer.status, answer.text) == (503, "not ready: the API server refuses our credentials (401)\n")
    kube.refused_since = None
    assert agent.ready


def test_slots_are_given_in_order() -> None:
    freed: list[str] = []
    slots = Slots(freed.append)
    assert slots.take("a", 2)
    assert slots.take("b", 2)
    assert not slots.take("c", 2)
    assert not slots.take("d", 2)
    slots.leave("a")
    assert freed == ["c", "d"]
    assert not slots.take("d", 2)
    assert slots.take("c", 2)
    slots.leave("nobody")
    assert freed == ["c", "d"]
    slots.leave("d")
    assert len(slots) == 2


# --- ledger ----------------------------------------------------------------------------------------------------------


def test_the_ledger_outlives_its_process_and_forgets_nothing_twice(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.load()
    ledger.begin("art", "u", "p", "i", 1.0)
    ledger.begin("art", "u", "p", "i", 2.0)
    assert ledger.settle("art", "p", "i", "failed", Reason.RESTORE_FAILED, "m")
    assert not ledger.settle("art", "p", "i", "failed", Reason.RESTORE_FAILED, "m")
    ledger.capture_failed("order", "u2", "First", "m")
    ledger.capture_failed("order", "u2", "Second", "m")
    (tmp_path / ".x.tmp").write_text("half")
    (tmp_path / "broken.json").write_text("{")
    again = Ledger(str(tmp_path))
    again.load()
    assert again.entry("art", "u") == ledger.entry("art", "u")
    assert (again.entry("art", "u").failed, again.entry("art", "u").consecutive) == (1, 1)
    failed = again.entry("order", "u2").capture_failed
    assert failed is not None
    assert failed.reason == "First"
    assert not (tmp_path / ".x.tmp").exists()
    # Another content of the same name has no past.
    assert again.entry("art", "other").failed == 0


def test_an_older_agent_keeps_what_it_understands_of_a_newer_ones_ledger(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.load()
    ledger.begin("art", "u", "p", "i", 1.0)
    ledger.settle("art", "p", "i", "failed", Reason.CANARY_MISMATCH, "m")
    raw = json.loads((tmp_path / "art.json").read_text())
    raw["novelty"] = {"a": 1}
    raw["attempts"][0]["novelty"] = raw["quarantined"]["novelty"] = 1
    (tmp_path / "art.json").write_text(json.dumps(raw))
    again = Ledger(str(tmp_path))
    again.load()
    assert again.entry("art", "u") == ledger.entry("art", "u")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = ["uid", "attempts", "succeeded", "failed", "consecutive", "last_failure", "quarantined", "capture_failed"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(_FIELDS), _json) | st.binary(max_size=40))
def test_a_damaged_ledger_is_as_good_as_none(tmp_path: Path, changes: dict[str, Any] | bytes) -> None:
    for file in tmp_path.iterdir():
        file.unlink()
    good = Ledger(str(tmp_path))
    good.load()
    good.begin("art", "u", "p", "i", 1.0)
    if isinstance(changes, bytes):
        (tmp_path / "art.json").write_bytes(changes)
    else:
        raw = json.loads((tmp_path / "art.json").read_text())
        (tmp_path / "art.json").write_text(json.dumps({**raw, **changes}))
    ledger = Ledger(str(tmp_path))
    ledger.load()
    # Whatever was read can be gone on from.
    ledger.begin("art", "u", "q", "i", 2.0)
    assert ledger.settle("art", "q", "i", "failed", Reason.RESTORE_FAILED, "m")
    ledger.blocked("p")
    ledger.drop_pod("p")


def test_the_ledger_keeps_counts_and_drops_old_attempts(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.load()
    for i in range(KEEP + 10):
        ledger.begin("art", "u", f"p{i}", "i", float(i))
        ledger.settle("art", f"p{i}", "i", "succeeded")
    entry = ledger.entry("art", "u")
    assert (entry.succeeded, len(entry.attempts)) == (KEEP + 10, KEEP)


def test_a_pod_that_goes_during_a_restore_is_nobodys_failure(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.load()
    ledger.begin("art", "u", "p", "i", 1.0)
    ledger.drop_pod("p")
    assert [a.outcome for _, a in ledger.attempts("p")] == ["aborted"]
    assert (ledger.entry("art", "u").failed, ledger.blocked("p")) == (0, {})


def test_the_throughput_of_the_node_is_that_of_its_last_restores(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.load()
    assert ledger.restore_bytes_per_s() is None
    ledger.moved(1_000_000, 1.0)
    ledger.moved(9_000_000, 1.0)
    assert ledger.restore_bytes_per_s() == 5_000_000
    ledger.begin("art", "u", "p", "i", 1.0)
    again = Ledger(str(tmp_path))
    again.load()
    assert again.restore_bytes_per_s() == 5_000_000
    assert again.contents() == ("art",), "what no content stands for is deleted"
    again.forget("art")
    assert again.restore_bytes_per_s() == 5_000_000
    for _ in range(SPEEDS_KEPT):
        again.moved(7_000_000, 1.0)
    assert again.restore_bytes_per_s() == 7_000_000


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[["x", 1]]', "[[1, 0]]", "[[-1, 1]]", "[[1, 1e300]]", "null"])
def test_a_throughput_that_cannot_be_believed_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / SPEEDS).write_text(text)
    ledger = Ledger(str(tmp_path))
    ledger.load()
    ledger.moved(0, 1.0)
    ledger.moved(1, 0.0)
    ledger.moved(1, -1.0)
    assert ledger.restore_bytes_per_s() is None


# --- configuration ---------------------------------------------------------------------------------------------------


def test_a_flag_wins_over_the_environment() -> None:
    found = config.parse(["--port", "9", "--log-level", "debug"], {"NODE_NAME": "n", "VLLMSNAPSHOT_HEALTH_PORT": "8"})
    assert (found.node_name, found.port, found.log_level, found.kubelet_dir) == ("n", 9, "DEBUG", "/var/lib/kubelet")


@pytest.mark.parametrize(
    ("args", "env", "text"),
    [
        ([], {}, "NODE_NAME"),
        ([], {"NODE_NAME": "n", "VLLMSNAPSHOT_HEALTH_PORT": "x"}, "port"),
        (["--port", "70000"], {"NODE_NAME": "n"}, "port"),
        (["--log-level", "loud"], {"NODE_NAME": "n"}, "log-level"),
        (["--resync-seconds", "0"], {"NODE_NAME": "n"}, "resync"),
    ],
)
def test_a_wrong_setting_is_named(args: list[str], env: dict[str, str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse(args, env)
    assert text in capsys.readouterr().err


# --- canary ----------------------------------------------------------------------------------------------------------

GOOD = {"text": " Paris", "logprobs": {"token_logprobs": [-0.25]}, "token_ids": [7]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (GOOD, ([7], " Paris", -0.25)),
        ({**GOOD, "token_ids": None}, ([], " Paris", -0.25)),
        ({**GOOD, "token_ids": ["x"]}, None),
        ({**GOOD, "text": 7}, None),
        ({**GOOD, "logprobs": None}, None),
        ({**GOOD, "logprobs": {"token_logprobs": [None]}}, None),
        ("nonsense", None),
        ("big", None),
        ("redirect", None),
    ],
)
async def test_the_canary_believes_only_what_makes_sense(choice: Any, expected: Any) -> None:
    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def completions(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 1, 0)
        if choice == "nonsense":
            return web.Response(text="<html>")
        if choice == "big":
            return web.Response(body=b" " * (2 << 20))
        if choice == "redirect":
            return web.Response(status=307, headers={"Location": "/v1/models"})
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    canary = Canary()
    found = await canary.ask("127.0.0.1", port)
    assert (None if found is None else (found.token_ids, found.text, found.sampled_token_logprob)) == expected
    await runner.cleanup()
    assert await canary.ask("127.0.0.1", port) is None
    await canary.close()


@pytest.mark.parametrize("alive", [True, False])
def test_a_container_that_ended_during_its_restore_is_no_error(alive: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A pod that is deleted while it is being restored: nothing is left to be cleared, and nothing to be told."""

    def gone() -> list[Process]:
        raise ProcessLookupError("PID 1 of the container has died")

    container = cast("Container", SimpleNamespace(descendants=gone, processes=gone, alive=lambda: alive))
    restore._roll_back(container, cast("Manifest", SimpleNamespace(staged={})), Cpu())
    assert bool(caplog.records) is alive
