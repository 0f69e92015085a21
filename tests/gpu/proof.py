"""The course of a proof: a process on the GPU is captured, goes on, is ended, and comes back, twice at once; everything by the
agent's own code (capture, restore, CRIU, CUDA), in bare containers instead of pods. What it computes afterwards is compared.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from tests.gpu.place import Place
from tests.node.bare import Bare
from vllmsnapshot.agent.capture import CaptureRequest, capture
from vllmsnapshot.agent.containers import Process
from vllmsnapshot.agent.criu import Criu
from vllmsnapshot.agent.cuda import MEMORY_MARGIN, Cuda
from vllmsnapshot.agent.driver_pool import Limits, Session
from vllmsnapshot.agent.errors import AgentError
from vllmsnapshot.agent.restore import RestoreRequest, clear, restore
from vllmsnapshot.agent.store import Manifest, Store
from vllmsnapshot.environment import MEMORY_USED, PIDS

Answer = Mapping[str, Any]

COPIES = 2
"""Restores at once."""

HOST_MARGIN = 1 << 30
"""Bytes of the machine's memory to be left beside the copies."""

LIMITS = Limits(move=120.0)
"""Within the time of one proof."""

LIMITS_AFTERWARDS = Limits(start=15.0, query=5.0, lock=5.0, move=30.0)
"""For cleaning up, when the time may be over."""


class ProofError(Exception):
    """Something was not as it must be."""


class SkippedError(Exception):
    """The proof cannot be made here; the message says why."""


class OutOfTime(BaseException):
    """The time of a proof has ended."""


class Workload(Protocol):
    """A process to be captured, and what it has to say."""

    name: str
    loopback: bool
    """Whether it may listen on a loopback address when it is captured."""

    def command(self) -> list[str]:
        """What a container runs."""

    def up(self, engine: Engine) -> Answer:
        """Wait until it can be captured; what it says of itself. `bytes`: of the GPU's memory that it fills."""

    def before(self, engine: Engine) -> Answer:
        """What it says before it is captured."""

    def after(self, engine: Engine) -> Answer:
        """What it says next: equal in the captured process and in every copy. Raises ProofError if it is wrong in itself."""

    def follows(self, before: Answer, after: Answer) -> str:
        """What is wrong between the two; empty if nothing is."""


class Timed(Cuda):
    """Notes how long each step takes in which process."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env=env, limits=LIMITS)
        self.steps: list[tuple[str, int, float]] = []

    def _step(self, session: Session, p: Process, op: str, wanted: int, **args: Any) -> None:
        began = time.monotonic()
        try:
            super()._step(session, p, op, wanted, **args)
        finally:
            self.steps.append((op, p.pid, time.monotonic() - began))

    def seconds(self, pids: set[int], since: int = 0) -> dict[str, float]:
        """Per step, of these processes, leaving out the first `since` steps."""
        total: dict[str, float] = {}
        for op, pid, seconds in self.steps[since:]:
            if pid in pids:
                total[op.lower()] = total.get(op.lower(), 0.0) + seconds
        return total

    def raw(self) -> dict[str, Any]:
        """The driver's facts, device by device."""
        with self.helpers.session() as session:
            facts: dict[str, Any] = session.call("Facts", self._limits.query)
        return facts


class Engine:
    """A container of a workload: what comes out of it, and its end."""

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.output: list[str] = []

    def start(self) -> None:
        """Start the process."""
        self.bare.go()
        while not self.bare.container.descendants():
            time.sleep(0.005)

    def message(self, key: str) -> Answer:
        """The next line that says this. Raises ProofError when the process has died."""
        while True:
            try:
                line = self.bare.line(1.0)
            except AssertionError:
                self.alive()
                continue
            if line.startswith("{") and key in (said := json.loads(line)):
                return dict(said[key])
            self.output = [*self.output[-199:], line]

    def last_words(self) -> list[str]:
        """The end of its output."""
        with contextlib.suppress(AssertionError):
            while True:
                self.output = [*self.output[-199:], self.bare.line(0.2)]
        return self.output[-120:]

    def alive(self) -> None:
        """Raise ProofError if the process has died."""
        if not self.bare.container.descendants():
            raise ProofError("the process has died: " + " | ".join(self.output[-5:]))

    def ask(self) -> Answer:
        """Have it answer (loop.py)."""
        (self.bare.control / "ask").touch()
        return self.message("answer")

    def file(self, name: str) -> dict[str, Any]:
        """The content of a file of the control directory, once it is there."""
        while not (self.bare.control / name).exists():
            if (self.bare.control / "failed.json").exists():
                raise ProofError(f"failed: {(self.bare.control / 'failed.json').read_text()}")
            with contextlib.suppress(AssertionError):
                self.output = [*self.output[-199:], self.bare.line(0.2)]
            self.alive()
        return dict(json.loads((self.bare.control / name).read_text()))


@dataclass(kw_only=True)
class Proof:
    """What a proof needs, and the machine's bandwidth if that is known."""

    place: Place
    cuda: Timed
    criu: Criu | None
    directory: Path
    say: Callable[[str], None]
    bandwidth: Mapping[str, float] = field(default_factory=dict)

    def run(self, workload: Workload, result: dict[str, Any]) -> None:
        """Do it; `result` fills as it goes, so that a failure tells how far it got. Raises ProofError, AgentError.

        Without CRIU only the driver's part: the process is checkpointed and goes on.
        """
        if self.criu is None:
            self._without_criu(workload, result)
            return
        store = Store(self.directory / workload.name)
        store.recover()
        free = self._free()
        with contextlib.ExitStack() as stack:
            source, facts, first = self._started(stack, workload, result)
            self.say("capturing it")
            manifest, result["capture"] = self._capture(source, workload, store, facts)
            result["memoryUsedBytes"] = int(manifest.environment.get(MEMORY_USED, 0))
            result["artifactBytes"] = manifest.disk_bytes
            if not manifest.environment.get(PIDS):
                raise ProofError("the driver knows no process of the captured tree")
            expected = self._goes_on(source, workload, first, result)
            result["end"] = self._end(source)
            self.say(f"captured: {_text(result['capture'])}; ended: {_text(result['end'])}")
            count, why = self._room(result["memoryUsedBytes"], manifest.memory_bytes)
            if why:
                result["skipped"] = [f"a second restore at the same time: {why}"]
            self.say(f"restoring it {count} times at once")
            copies = [self.container(stack) for _ in range(count)]
            result["restores"] = self._restore(copies, store, facts)
            for number, restored in enumerate(result["restores"], 1):
                self.say(f"restored {number}: {_text(restored)}")
            for number, copy in enumerate(copies, 1):
                answer = workload.after(copy)
                check(answer == expected, f"restore {number} is not what was captured: {_difference(answer, expected)}")
                result["checks"].append(f"restore {number}: memory and results are equal")
            for copy in copies:
                self._end(copy)
        left = free - self._free()
        result["memoryNotGivenBackBytes"] = max(0, left)

    def _without_criu(self, workload: Workload, result: dict[str, Any]) -> None:
        with contextlib.ExitStack() as stack:
            source, facts, first = self._started(stack, workload, result)
            tree = source.bare.container.descendants()
            recorded = self.cuda.record(tree)
            result["memoryUsedBytes"] = int(recorded.get(MEMORY_USED, 0))
            self.say("checkpointing it on the GPU, and back")
            try:
                self.cuda.before_dump(tree)
            finally:
                self.cuda.after_dump(tree)
            steps = self.cuda.seconds({p.pid for p in tree})
            result["capture"] = {"seconds": {k: round(v, 4) for k, v in steps.items()}, **self._rates(steps, facts)}
            self.say(_text(result["capture"]))
            self._goes_on(source, workload, first, result)
            self._end(source)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _started(self, stack: contextlib.ExitStack, workload: Workload, result: dict[str, Any]) -> tuple[Engine, Answer, Answer]:
        source = self.container(stack, workload.command())
        if self.criu is not None:
            self.criu.raise_pids(source.bare.container, 999)
        self.say("starting the process")
        source.start()
        facts = workload.up(source)
        result["process"] = dict(facts)
        return source, facts, workload.before(source)

    def _goes_on(self, source: Engine, workload: Workload, first: Answer, result: dict[str, Any]) -> Answer:
        after = workload.after(source)
        check(not (wrong := workload.follows(first, after)), f"the captured process did not go on as before: {wrong}")
        result["checks"] = ["the captured process goes on, memory and results are right"]
        return after

    def container(self, stack: contextlib.ExitStack, command: Sequence[str] = ()) -> Engine:
        """A container that ends with the stack; `start` starts the command."""
        environment = [f"{k}={v}" for k, v in self.place.application.items()]
        whole = ["/usr/bin/env", *environment, *command] if command else []
        with held():
            engine = Engine(Bare(whole, mounts=self.place.mounts))
            stack.push(lambda kind, *_: self._close(engine, failed=kind is not None))
        return engine

    def _close(self, engine: Engine, *, failed: bool) -> None:
        with held():
            try:
                self._leave(engine, failed=failed)
            finally:
                engine.bare.close()

    def _leave(self, engine: Engine, *, failed: bool) -> None:
        """Whatever happened: killed with its context alive, a process that was restored can take the host down."""
        for line in engine.last_words() if failed else ():
            self.say(f"    {line}")
        cuda = Cuda(env=self.place.agent, limits=LIMITS_AFTERWARDS)
        with contextlib.closing(cuda), contextlib.suppress(AgentError, OSError):
            cuda.before_terminate(engine.bare.container.descendants())

    def _capture(self, engine: Engine, workload: Workload, store: Store, facts: Answer) -> tuple[Manifest, dict[str, Any]]:
        assert self.criu is not None
        since = len(self.cuda.steps)
        request = CaptureRequest(content="proof", timeout_s=_left(), allow_loopback_listeners=workload.loopback)
        done = capture(engine.bare.container, request, store, self.criu, self.cuda)
        pids = {p.pid for p in engine.bare.container.descendants()}
        steps = self.cuda.seconds(pids, since)
        # `restore` and `unlock` of this one put the captured process back to work.
        phases = {**done.phases, **steps}
        return done.manifest, {
            "seconds": {k: round(v, 4) for k, v in phases.items()},
            **self._rates(steps, facts),
            **_rate("criuBytesPerSecond", done.manifest.disk_bytes, phases.get("criu")),
        }

    def _restore(self, engines: Sequence[Engine], store: Store, facts: Answer) -> list[dict[str, Any]]:
        """All at once. Raises what the first failure raised."""
        results: list[dict[str, Any]] = [{} for _ in engines]
        errors: list[Exception] = []
        since = len(self.cuda.steps)
        limit = _left()

        assert self.criu is not None
        criu = self.criu

        def one(engine: Engine, result: dict[str, Any]) -> None:
            try:
                container = engine.bare.container
                done = restore(container, RestoreRequest(content="proof", timeout_s=limit), store, criu, self.cuda)
                steps = self.cuda.seconds({p.pid for p in container.descendants()}, since)
                phases = {"all": done.phases["restore"], **{k: v for k, v in done.phases.items() if k != "restore"}, **steps}
                result["seconds"] = {k: round(v, 4) for k, v in phases.items()}
                result |= self._rates(steps, facts)
                result |= _rate("criuBytesPerSecond", done.manifest.disk_bytes, phases.get("criu"))
            except Exception as e:
                errors.append(e)

        threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in zip(engines, results, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def _end(self, engine: Engine) -> dict[str, Any]:
        """As the agent ends a tree on a GPU."""
        began = time.monotonic()
        self.cuda.before_terminate(engine.bare.container.descendants())
        moved = time.monotonic()
        clear(engine.bare.container)
        return {"seconds": {"suspend": round(moved - began, 4), "kill": round(time.monotonic() - moved, 4)}}

    def _rates(self, steps: Mapping[str, float], facts: Answer) -> dict[str, Any]:
        """Bytes per second of the moves, and their part of what the GPU's copies reach."""
        rates: dict[str, Any] = {}
        for step, way in (("checkpoint", "toHost"), ("restore", "toDevice")):
            rates |= _rate(f"{step}BytesPerSecond", facts.get("bytes", 0), steps.get(step))
            if self.bandwidth.get(way) and f"{step}BytesPerSecond" in rates:
                rates[f"{step}OfBandwidth"] = round(rates[f"{step}BytesPerSecond"] / self.bandwidth[way], 3)
        return rates

    def _free(self) -> int:
        """Bytes free on the GPU that containers see."""
        minors = {path.removeprefix("/dev/nvidia") for path in self.place.mounts}
        return sum(int(d["free"]) for d in self.cuda.raw()["devices"] if str(d["minor"]) in minors)

    def _room(self, used: int, memory: int) -> tuple[int, str]:
        """How many restores there is room for at once, and what a second one lacks."""
        free = self._free()
        if free < COPIES * (used + MEMORY_MARGIN):
            return 1, f"the GPU has {free} bytes free, each copy needs {used + MEMORY_MARGIN}"
        available = available_memory()
        # The GPU's memory is held twice for a moment: by the driver, and by CRIU's image in the page cache.
        if available < COPIES * 2 * memory + HOST_MARGIN:
            return 1, f"the machine has {available} bytes of memory available, each copy needs {2 * memory}"
        return COPIES, ""


def available_memory() -> int:
    """Bytes of the machine's memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def check(good: bool, otherwise: str) -> None:
    """Raise ProofError unless it is good."""
    if not good:
        raise ProofError(otherwise)


def _rate(name: str, size: int, seconds: float | None) -> dict[str, int]:
    return {name: round(size / seconds)} if size and seconds else {}


def _difference(one: Answer, other: Answer) -> str:
    return ", ".join(f"{k}: {one.get(k)} instead of {other.get(k)}" for k in {**one, **other} if one.get(k) != other.get(k))


def _text(result: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v:.2f} s" for k, v in result.get("seconds", {}).items())


# --- time and interruptions ------------------------------------------------------------------------------------------

_deadline = [float("inf")]
_holding = [0]
_waiting: list[type[BaseException]] = []


def interrupt(error: type[BaseException]) -> None:
    """From a signal's handler: raise the error, or do so as soon as nothing holds it."""
    if _holding[0]:
        _waiting.append(error)
    else:
        raise error


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let nothing interrupt this: a container that is half made, or half removed, would stay. Main thread only."""
    _holding[0] += 1
    try:
        yield
    finally:
        _holding[0] -= 1
        if _waiting and not _holding[0]:
            error = _waiting[0]
            _waiting.clear()
            raise error


def _left() -> float:
    return max(1.0, min(600.0, _deadline[0] - time.monotonic()))


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread when the time is over."""

    def over(number: int, frame: FrameType | None) -> None:
        interrupt(OutOfTime)

    before = signal.signal(signal.SIGALRM, over)
    _deadline[0] = time.monotonic() + seconds
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _deadline[0] = float("inf")
