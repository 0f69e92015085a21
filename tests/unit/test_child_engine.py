"""What vLLM is asked to do around the barrier, and in which order; vLLM itself is played at the boundary of its engine client.

The stand-in has the states that vLLM 0.32 has on a GPU (`v1/engine/core.py`, `v1/executor/abstract.py`, `device_allocator`): what
is mapped, what is in it, whether requests are scheduled. A call in the wrong order fails there, or leaves it unable to answer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.child_harness import free_port
from vllmsnapshot_child import memory, protocol, weights
from vllmsnapshot_child.engine import EngineError
from vllmsnapshot_child.machine import UNFIT_FOR_BARRIER
from vllmsnapshot_child.oracle import Prompt
from vllmsnapshot_child.protocol import Oracle, Reason
from vllmsnapshot_child.server import Control, Options, Server
from vllmsnapshot_child.vllm_engine import CpuVllmEngine, VllmEngine

GIB = 1 << 30
WEIGHTS, KV_CACHE, OTHER = 8 * GIB, 20 * GIB, 2 * GIB


class OldClient:
    """AsyncLLM on a GPU, before `release_kv_cache_memory`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.paused = False
        self.weights = "model"
        self.cached_prefix = True
        self.reloads = "model"
        self.level = 0

    def note(self, call: str) -> None:
        self.calls.append(call)

    # --- the client's interface ---

    async def sleep(self, level: int = 1) -> None:
        self.note(f"sleep {level}")
        self.paused, self.cached_prefix, self.level = True, False, level
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            self.weights = "gone"

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.note(f"wake {' '.join(tags or [])}")
        assert tags, "all at once would schedule requests before the weights are there"
        assert self.asleep.issuperset(tags), "vLLM ignores it with a warning"
        self.asleep -= set(tags)
        if "weights" in tags and self.weights == "gone":
            self.weights = "garbage"
        if not self.asleep:
            self.paused = False
        return not self.asleep

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "vllmsnapshot_weight_bytes":
            return [WEIGHTS]
        if method == "vllmsnapshot_parent":
            return [os.getpid()]
        if method == "vllmsnapshot_free_device_bytes":
            return [80 * GIB - OTHER - (WEIGHTS if "weights" not in self.asleep else 0) - self.kv_bytes()]
        self.note(method)
        if method == "reload_weights":
            assert "weights" not in self.asleep, "there is nothing to load them into"
            self.weights = self.reloads
        if method == "vllmsnapshot_park":
            return [["127.0.0.1:29500"]]
        if method == "vllmsnapshot_trim":
            return [GIB]
        return [None]

    def kv_bytes(self) -> int:
        return KV_CACHE if "kv_cache" not in self.asleep else 0

    # --- what a request finds ---

    def answer(self) -> str:
        assert not self.paused, "it would wait for ever"
        assert not self.asleep
        assert not self.cached_prefix or self.level == 0, "a cached prefix points into a KV cache that was given back"
        return self.weights


class Client(OldClient):
    """AsyncLLM of vLLM 0.32."""

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.note(f"pause {mode}")
        self.paused = True
        self.cached_prefix = not clear_cache

    async def release_kv_cache_memory(self) -> None:
        self.note("release kv_cache")
        if not self.paused:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        if self.asleep:
            raise RuntimeError("release_kv_cache_memory() requires all executor memory to be resident")
        self.asleep, self.level = {"kv_cache"}, 1


class Played:
    """The parts of an engine that need vLLM's modules; everything else is the adapter's own."""

    client: Any
    app: Any
    served = False

    async def start(self) -> None:
        pass

    async def canary(self, prompt: Prompt) -> Oracle:
        return Oracle(token_ids=[1] * prompt.tokens, text=self.client.answer(), sampled_token_logprob=-0.5, prompt=prompt.text)

    async def prebuild(self) -> None:
        self.client.note("prebuild")

    async def trim(self) -> None:
        self.client.note("trim")

    async def serve(self, listener: socket.socket, host: str | None, port: int, serving: Callable[[], None]) -> None:
        listener.listen()
        serving()
        self.served = True


class GpuEngine(Played, VllmEngine):
    """On a GPU."""


class CpuEngine(Played, CpuVllmEngine):
    """On CPU."""


class Life:
    """A whole life of the server: to the barrier, released at once, to serving."""

    def __init__(self, directory: Path, engine: type[Any], client: Any) -> None:
        self.directory, self.client = directory, client
        self.engine = engine(argparse.Namespace(), seeded=False)
        self.engine.client = client
        self.port = free_port()
        options = Options(ready_file=str(directory / protocol.READY), release_file=str(directory / protocol.RELEASE))
        self.server = Server(options, Control(options), lambda args, barrier: self.engine)

    def start(self, **value: Any) -> None:
        """What the agent answered."""
        with protocol.open_dir(str(self.directory)) as fd:
            protocol.Start.from_dict({"incarnation": "here", "mode": "cold", "reason": "NoArtifact", **value}).save(fd)

    async def run(self) -> dict[str, Any]:
        """The ready file."""
        release = {"release": True, "host": "127.0.0.1", "port": self.port}
        (self.directory / protocol.RELEASE).write_text(json.dumps(release))
        await self.server.run()
        assert self.engine.served
        ready: dict[str, Any] = json.loads((self.directory / protocol.READY).read_text())
        return ready


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMSNAPSHOT_INCARNATION", "here")
    monkeypatch.delenv(weights.POLICY, raising=False)
    monkeypatch.setattr(memory, "room", lambda: None)
    monkeypatch.setattr(memory, "park_listeners", list)


BARRIER = ["vllmsnapshot_park", "trim", "vllmsnapshot_renew"]


async def test_discarded_weights_on_a_gpu(tmp_path: Path) -> None:
    """Twice in the order of vLLM's own snapshot child: weights mapped, weights read, KV cache mapped, then requests."""
    life = Life(tmp_path, GpuEngine, Client())
    ready = await life.run()
    reload = ["wake weights", "reload_weights", "wake kv_cache"]
    assert life.client.calls == ["sleep 2", *reload, "prebuild", "sleep 2", *BARRIER, *reload]
    assert (ready["weights"], ready["weights_reason"]) == ("Discard", "capture.weights is Discard")
    assert ready["bytes_freed"] == WEIGHTS + KV_CACHE


async def test_kept_weights_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the KV cache is given back; nothing is copied to the host and nothing is read again."""
    monkeypatch.setenv(weights.POLICY, "Keep")
    life = Life(tmp_path, GpuEngine, Client())
    ready = await life.run()
    shed = ["pause abort", "release kv_cache"]
    assert life.client.calls == [*shed, "wake kv_cache", "prebuild", *shed, *BARRIER, "wake kv_cache"]
    assert (ready["weights"], ready["bytes_freed"]) == ("Keep", KV_CACHE)


async def test_kept_weights_before_vllm_0_32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights.POLICY, "Keep")
    life = Life(tmp_path, GpuEngine, OldClient())
    assert (await life.run())["bytes_freed"] == KV_CACHE
    shed = ["sleep 1", "wake weights"]
    assert life.client.calls == [*shed, "wake kv_cache", "prebuild", *shed, *BARRIER, "wake kv_cache"]


async def test_other_weights_after_a_reload_end_the_rehearsal(tmp_path: Path) -> None:
    life = Life(tmp_path, GpuEngine, Client())
    life.client.reloads = "another model"
    with pytest.raises(EngineError) as e:
        await life.run()
    assert e.value.reason == Reason.REHEARSAL_MISMATCH
    assert not (tmp_path / protocol.READY).exists()


@pytest.mark.parametrize(
    ("start", "room", "choice"),
    [
        ({}, None, "Discard"),  # nothing measured
        ({"restore_bytes_per_s": 1}, None, "Discard"),  # 8 GiB at a byte a second
        ({"restore_bytes_per_s": 1 << 60}, None, "Keep"),
        ({"restore_bytes_per_s": 1 << 60}, WEIGHTS, "Discard"),  # would fit to the byte, and nothing else would
        ({"restore_bytes_per_s": 1 << 60}, 2 * WEIGHTS, "Keep"),
        ({"restore_bytes_per_s": 1 << 60, "incarnation": "another"}, None, "Discard"),
    ],
)
async def test_auto_decides_at_the_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Mapping[str, Any], room: int | None, choice: str
) -> None:
    """The reload is rehearsed in any case, since it has to be measured; then the choice holds for what follows."""
    monkeypatch.setenv(weights.POLICY, "Auto")
    monkeypatch.setattr(memory, "room", lambda: room)
    life = Life(tmp_path, GpuEngine, Client())
    life.start(**start)
    ready = await life.run()
    assert ready["weights"] == choice
    assert ready["weights_reason"]
    rehearsal = ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "prebuild"]
    assert life.client.calls[:5] == rehearsal
    assert ("reload_weights" in life.client.calls[5:]) is (choice == "Discard")


async def test_a_start_file_that_cannot_be_believed_costs_the_figure_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(weights.POLICY, "Auto")
    (tmp_path / protocol.START).write_text('{"incarnation": "here", "mode": "cold", "reason": "x", "restore_bytes_per_s": -1}')
    assert (await Life(tmp_path, GpuEngine, Client()).run())["weights"] == "Discard"


# --- the canary ---


class Generator:
    """The engine client, as far as a prompt goes."""

    def __init__(self, output: Any) -> None:
        self.output = output

    async def generate(self, prompt: str, sampling: Any, *, request_id: str) -> AsyncIterator[Any]:
        assert (prompt, sampling) == ("p", {"temperature": 0, "min_tokens": 2, "max_tokens": 2, "seed": 0, "logprobs": 0})
        yield SimpleNamespace(outputs=[])  # what has come so far; the last one counts
        yield SimpleNamespace(outputs=self.output)


def completion(*ids: int, logprobs: Any) -> list[Any]:
    return [SimpleNamespace(token_ids=ids, text="t", logprobs=logprobs)]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))


async def ask(output: Any) -> Oracle:
    engine = VllmEngine(argparse.Namespace(), seeded=False)
    engine.client = Generator(output)
    return await engine.canary(Prompt("p", 2))


def chosen(logprob: Any) -> Any:
    return [{7: SimpleNamespace(logprob=logprob)}, {8: SimpleNamespace(logprob=-0.1)}]


@pytest.mark.usefixtures("vllm")
async def test_the_canary_is_the_tokens_and_the_first_ones_logprob() -> None:
    answer = await ask(completion(7, 8, logprobs=chosen(-0.25)))
    assert answer == Oracle(token_ids=[7, 8], text="t", sampled_token_logprob=-0.25, prompt="p")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    "output",
    [
        [],
        completion(logprobs=[]),
        completion(7, 8, logprobs=None),
        completion(7, 8, logprobs=[]),
        completion(7, 8, logprobs=[{9: SimpleNamespace(logprob=-1.0)}]),
        completion(7, 8, logprobs=chosen(None)),
        completion(7, 8, logprobs=chosen(float("nan"))),
        completion(7, 8, logprobs=chosen(float("-inf"))),
        completion(7, logprobs=chosen(-0.25)),
    ],
    ids=["no-output", "no-token", "no-logprobs", "empty-logprobs", "another-tokens", "none", "nan", "infinite", "too-short"],
)
async def test_an_answer_that_proves_nothing_is_none(output: Any) -> None:
    with pytest.raises(EngineError) as caught:
        await ask(output)
    assert caught.value.reason == Reason.CANARY_FAILED


# --- on CPU: the worker extension ---


class CpuClient:
    """AsyncLLM on CPU with the extension: it has no sleep mode."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights = self.kv_cache = "model"
        self.parent = os.getpid()  # of the worker
        self.ours = "model"  # what the extension's own reload gives
        self.fails = False

    def note(self, call: str) -> None:
        self.calls.append(call)

    async def reset_prefix_cache(self) -> None:
        self.note("reset prefix cache")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "vllmsnapshot_parent":
            return [self.parent]
        self.note(" ".join([method.removeprefix("vllmsnapshot_"), *(str(a) for a in args if isinstance(a, bool))]))
        match method:
            case "vllmsnapshot_digests":
                return [{"weight": self.weights}]
            case "vllmsnapshot_drop":
                if args[0]:
                    self.weights = "zeros"
                return [[WEIGHTS if args[0] else 0, KV_CACHE]]  # a list, as it comes from another process
            case "vllmsnapshot_reload":
                if self.fails:
                    raise RuntimeError("no such loader")
                self.weights = self.ours
            case "reload_weights":
                self.weights = "model"
            case "vllmsnapshot_park":
                return [[]]
        return [None]

    def answer(self) -> str:
        return self.weights


async def test_discarded_weights_on_cpu(tmp_path: Path) -> None:
    """The bits are compared once, in the rehearsal."""
    life = Life(tmp_path, CpuEngine, CpuClient())
    ready = await life.run()
    drop = ["reset prefix cache", "drop True"]
    assert life.client.calls == [
        *("reset prefix cache", "digests", "drop True", "reload", "digests", "prebuild"),
        *(*drop, "park", "trim", "renew False", "reload"),
    ]
    assert (ready["weights"], ready["bytes_freed"]) == ("Discard", WEIGHTS + KV_CACHE)


async def test_kept_weights_on_cpu_are_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights.POLICY, "Keep")
    life = Life(tmp_path, CpuEngine, CpuClient())
    ready = await life.run()
    drop = ["reset prefix cache", "drop False"]
    assert life.client.calls == [*drop, "prebuild", *drop, "park", "trim", "renew False"]
    assert (ready["weights"], ready["bytes_freed"]) == ("Keep", KV_CACHE)


class Core:
    """The engine's own process, between the API server and a worker of its own; vLLM calls what its class has."""

    def __init__(self, *, plugin: bool) -> None:
        self.calls: list[str] = []
        self.plugin = plugin

    async def call_utility_async(self, method: str, *_args: Any) -> Any:
        if not self.plugin:
            raise RuntimeError(f"Call to {method} method failed: 'EngineCoreProc' object has no attribute '{method}'")
        self.calls.append(method)
        return [] if method == "vllmsnapshot_park" else None


class TrimmingEngine(CpuEngine):
    """With the part of `trim` that concerns other processes."""

    async def trim(self) -> None:
        await self._everywhere("vllmsnapshot_trim")


async def test_an_engine_process_that_is_no_worker_is_reached_too(tmp_path: Path) -> None:
    life = Life(tmp_path, TrimmingEngine, CpuClient())
    life.client.parent, life.client.engine_core = 1, Core(plugin=True)
    await life.run()
    assert life.client.engine_core.calls == ["vllmsnapshot_park", "vllmsnapshot_trim", "vllmsnapshot_renew"]


async def test_what_cannot_be_reached_is_not_cloned(tmp_path: Path) -> None:
    """Init starts such a replica without a barrier: plain vLLM would serve."""
    life = Life(tmp_path, CpuEngine, CpuClient())
    life.client.parent, life.client.engine_core = 1, Core(plugin=False)
    with pytest.raises(EngineError, match="vllmsnapshot_park") as caught:
        await life.run()
    assert caught.value.reason in UNFIT_FOR_BARRIER
    assert not (tmp_path / protocol.READY).exists()


@pytest.mark.parametrize("policy", ["Discard", "Auto"])
@pytest.mark.parametrize("fails", [True, False])
async def test_weights_that_do_not_come_back_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, fails: bool
) -> None:
    """Whatever is wanted: vLLM's own reload puts them right once, and they are not dropped again."""
    monkeypatch.setenv(weights.POLICY, policy)
    life = Life(tmp_path, CpuEngine, CpuClient())
    life.client.ours, life.client.fails = "nearly the model", fails
    life.start(restore_bytes_per_s=1)
    ready = await life.run()
    assert (ready["weights"], ready["bytes_freed"]) == ("Keep", KV_CACHE)
    assert ("no such loader" if fails else "other bits") in ready["weights_reason"]
    assert life.client.calls.count("reload_weights") == 1
    assert life.client.calls[-4:] == ["drop False", "park", "trim", "renew False"]


# --- the rule ---

FACTS = weights.Facts(bytes=800_000_000, reload_s=1.0, restore_bytes_per_s=1_000_000_000)


@pytest.mark.parametrize(
    ("wanted", "change", "choice"),
    [
        ("Discard", {}, "Discard"),
        ("Keep", {}, "Keep"),
        ("Keep", {"room": 0}, "Keep"),  # said is said; the agent refuses the capture where they do not fit
        ("Auto", {}, "Keep"),  # exactly the margin
        ("Auto", {"bytes": 800_000_001}, "Discard"),
        ("Auto", {"reload_s": 0.99}, "Discard"),
        ("Auto", {"restore_bytes_per_s": None}, "Discard"),
        ("Auto", {"restore_bytes_per_s": 0}, "Discard"),
        ("Auto", {"reload_s": 0.0}, "Discard"),
        ("Auto", {"bytes": 0, "reload_s": 0.0}, "Keep"),  # all of them are in the image anyway
        ("Auto", {"room": 800_000_000 + weights.ROOM_MARGIN}, "Keep"),
        ("Auto", {"room": 800_000_000 + weights.ROOM_MARGIN - 1}, "Discard"),
        ("Auto", {"room": -5}, "Discard"),
        ("Discard", {"fixed": "packed"}, "Keep"),
        ("Auto", {"fixed": "packed"}, "Keep"),
    ],
)
def test_the_rule(wanted: str, change: dict[str, Any], choice: str) -> None:
    found = weights.decide(wanted, FACTS._replace(**change))
    assert found.weights == choice
    assert found.why
    if wanted == "Auto" and not change.get("fixed"):
        assert f"{change.get('reload_s', 1.0):.2f} s" in found.why, "the figures that decided"


def test_a_policy_nobody_knows_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, policy in [("", "Discard"), ("Keep", "Keep"), ("Auto", "Auto"), ("keep", "Discard"), ("Sometimes", "Discard")]:
        monkeypatch.setenv(weights.POLICY, word)
        assert weights.policy() == policy
    assert os.environ[weights.POLICY] == "Sometimes"
