"""The barrier: its order, and that every way of failing ends before a port is open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.child_harness import PATH, alive, free_port, until
from vllmsnapshot_child import engine as engines
from vllmsnapshot_child import oracle, protocol
from vllmsnapshot_child.drain import NOTICE
from vllmsnapshot_child.engine import Dropped, EngineError, Reload
from vllmsnapshot_child.oracle import Prompt
from vllmsnapshot_child.protocol import EXIT_CODES, Oracle, ProtocolError, Reason
from vllmsnapshot_child.server import Control, Options, Server, bind, parse_options

RELEASE = {"release": True, "host": "127.0.0.1", "port": 1}


class Recorder:
    """An engine that notes what it is told. `answers` are used up from the front; then the usual one is given."""

    weights_on_device = False
    barrier: bool | None = None  # what it was created for

    def __init__(self, control: Path) -> None:
        self.control = control
        self.calls: list[str] = []
        self.answers: dict[str, list[str]] = {}
        self.fails: dict[str, BaseException] = {}
        self.env: dict[str, str] = {}
        self.release: bytes | None = json.dumps(RELEASE).encode()  # written as soon as the engine is at the barrier
        self.served = False
        self.serves = True
        self.logprob = -0.5
        self.stopped = asyncio.Event()
        self.limit_s = 0.0
        self.told: Callable[[Recorder], Awaitable[None]] | None = None  # while it serves

    def note(self, call: str) -> None:
        self.calls.append(call)
        if (error := self.fails.get(call)) is not None:
            raise error

    async def start(self) -> None:
        self.note("start")

    async def canary(self, prompt: Prompt) -> Oracle:
        self.note("canary" if prompt == oracle.FIRST else "more")
        waiting = self.answers.get(prompt.text)
        text = waiting.pop(0) if waiting else "yes"
        logprob = self.logprob if prompt == oracle.FIRST else -0.5
        return Oracle(token_ids=[1] * prompt.tokens, text=text, sampled_token_logprob=logprob, prompt=prompt.text)

    async def prebuild(self) -> None:
        self.note("prebuild")

    async def release_state(self, *, weights: bool) -> Dropped:
        self.note("release")
        return Dropped(weights=1 << 19 if weights else 0, rest=1 << 19)

    async def restore_state(self) -> Reload:
        self.note("restore")
        return Reload(seconds=0.25)

    async def park(self) -> list[str]:
        self.note("park")
        return ["127.0.0.1:5"]

    async def trim(self) -> None:
        self.note("trim")
        if self.release is not None:
            (self.control / protocol.RELEASE).write_bytes(self.release)

    async def renew(self, env: Mapping[str, str]) -> None:
        assert (self.control / protocol.READY).exists(), "before the barrier"
        self.logprob -= 0.0005
        self.note("renew")
        self.env = dict(env)

    async def serve(self, listener: socket.socket, host: str | None, port: int, serving: Callable[[], None]) -> None:
        self.note("serve")
        if self.serves:
            listener.listen()
            serving()
            self.served = True
            if self.told is not None:
                await self.told(self)

    def leave(self) -> None:
        self.note("leave")

    async def finish(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.note("finish")

    async def drop(self) -> None:
        self.note("drop")

    def stop(self) -> None:
        self.note("stop")
        self.stopped.set()

    async def close(self) -> None:
        self.note("close")


class Case:
    """A server around a recorder."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.engine = Recorder(directory)
        self.port = free_port()
        self.engine.release = json.dumps({**RELEASE, "port": self.port}).encode()
        options = {"ready_file": str(directory / protocol.READY), "release_file": str(directory / protocol.RELEASE), **options}
        self.options = Options(**options)
        self.server = Server(self.options, Control(self.options), self.create)

    def create(self, args: list[str], *, barrier: bool) -> Recorder:
        self.engine.barrier = barrier
        return self.engine

    async def run(self) -> None:
        await self.server.run()

    async def fails(self) -> EngineError | ProtocolError:
        with pytest.raises((EngineError, ProtocolError)) as e:
            await self.server.run()
        assert not self.engine.served
        assert not (self.directory / protocol.SERVING).exists()
        assert isinstance(e.value, EngineError | ProtocolError)
        return e.value

    def file(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.directory / name).read_text())
        return value


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv("VLLMSNAPSHOT_INCARNATION", "here")
    return Case(tmp_path)


MORE = ["more"] * len(oracle.MORE)


# --- the order ---


async def test_the_order_of_the_barrier(case: Case) -> None:
    await case.run()
    assert case.engine.barrier is True
    assert case.engine.calls == [
        *("start", "canary", *MORE),
        *("release", "restore", "canary", *MORE, "prebuild", "release", "park", "trim"),
        *("renew", "restore", "canary", *MORE, "serve"),
    ]


async def test_ready_says_what_vllms_child_says_and_more(case: Case) -> None:
    await case.run()
    ready = case.file(protocol.READY)
    assert (ready["token_ids"], ready["text"], ready["sampled_token_logprob"]) == ([1], "yes", -0.5)
    assert [m["prompt"] for m in ready["more"]] == [p.text for p in oracle.MORE]
    assert (ready["incarnation"], ready["protocol"], ready["bytes_freed"]) == ("here", 1, 1 << 20)
    assert ready["weights"] == "Discard"
    assert {"import_s", "engine_s", "canary_s", "release_s", "rehearsal_s", "prebuild_s"} <= set(ready["phases"])


async def test_serving_belongs_to_the_pod_that_released_it(case: Case) -> None:
    marker = {**RELEASE, "port": case.port, "incarnation": "there", "env": {"HOSTNAME": "pod-b"}}
    case.engine.release = json.dumps(marker).encode()
    await case.run()
    serving = case.file(protocol.SERVING)
    assert (serving["incarnation"], serving["host"], serving["port"]) == ("there", "127.0.0.1", case.port)
    assert serving["oracle"]["text"] == "yes"
    assert {"barrier_s", "reload_s", "canary_after_s", "bind_s", "release_to_serving_s"} <= set(serving["phases"])
    assert case.engine.env == {"HOSTNAME": "pod-b"}


async def test_vllms_release_marker_will_do(case: Case) -> None:
    await case.run()
    assert case.file(protocol.SERVING)["incarnation"] == "here"


async def test_unattended_there_is_no_barrier(tmp_path: Path) -> None:
    case = Case(tmp_path, unattended=True, host="127.0.0.1", port=free_port())
    await case.run()
    assert case.engine.calls == ["start", "canary", "serve"]
    assert case.engine.barrier is False
    assert not (tmp_path / protocol.READY).exists()
    assert case.file(protocol.SERVING)["port"] == case.options.port


async def test_unattended_it_serves_without_a_control_volume(tmp_path: Path) -> None:
    files = {"ready_file": str(tmp_path / "no/ready"), "release_file": str(tmp_path / "no/release")}
    case = Case(tmp_path, unattended=True, host="127.0.0.1", port=free_port(), **files)
    await case.run()
    assert case.engine.served


# --- answers ---


async def test_serving_has_the_answer_given_after_the_release(case: Case) -> None:
    """Not a copy of the recorded one, or whoever compares it again compares the record with itself."""
    await case.run()
    assert case.file(protocol.READY)["sampled_token_logprob"] == -0.5
    assert case.file(protocol.SERVING)["oracle"]["sampled_token_logprob"] == -0.5005


async def test_another_answer_in_the_rehearsal(case: Case) -> None:
    case.engine.answers[oracle.FIRST.text] = ["yes", "no"]
    assert (await case.fails()).reason == Reason.REHEARSAL_MISMATCH
    assert not (case.directory / protocol.READY).exists()


async def test_another_answer_after_the_release(case: Case) -> None:
    case.engine.answers[oracle.FIRST.text] = ["yes", "yes", "no"]
    error = await case.fails()
    assert error.reason == Reason.CANARY_MISMATCH
    assert "'no'" in error.message


async def test_another_answer_to_a_further_prompt_after_the_release(case: Case) -> None:
    case.engine.answers[oracle.MORE[-1].text] = ["yes", "yes", "no"]
    assert (await case.fails()).reason == Reason.CANARY_MISMATCH


async def test_a_further_prompt_that_the_engine_does_not_repeat_is_no_oracle(case: Case) -> None:
    case.engine.answers[oracle.MORE[0].text] = ["a", "b"]
    await case.run()
    assert [m["prompt"] for m in case.file(protocol.READY)["more"]] == [p.text for p in oracle.MORE[1:]]
    assert case.engine.calls.count("more") == 3 * len(oracle.MORE) - 1


# --- failures ---


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("start", Reason.ENGINE_FAILED),
        ("canary", Reason.CANARY_FAILED),
        ("release", Reason.RELOAD_FAILED),
        ("restore", Reason.RELOAD_FAILED),
        ("prebuild", Reason.ENGINE_FAILED),
        ("park", Reason.RELOAD_FAILED),
        ("renew", Reason.ENGINE_FAILED),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(1), TimeoutError("boom")])
async def test_a_step_that_fails_has_a_reason(case: Case, call: str, reason: str, error: BaseException) -> None:
    case.engine.fails[call] = error
    failure = await case.fails()
    assert failure.reason == reason
    assert failure.__cause__ is error


async def test_a_reason_of_the_engines_own_is_kept(case: Case) -> None:
    case.engine.fails["start"] = EngineError(Reason.BAD_ARGUMENTS, "m")
    assert (await case.fails()).reason == Reason.BAD_ARGUMENTS


async def test_nobody_releases_it(tmp_path: Path) -> None:
    case = Case(tmp_path, release_timeout_s=0.1)
    case.engine.release = None
    assert (await case.fails()).reason == Reason.RELEASE_TIMEOUT


async def test_the_release_limit_counts_slept_seconds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process, or an image on a disk, does not age: the clock may jump, the number of naps may not."""
    case = Case(tmp_path, release_timeout_s=1.0)
    case.engine.release = None
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", nap)
    assert (await case.fails()).reason == Reason.RELEASE_TIMEOUT
    assert sum(naps) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        (b"{", Reason.NOT_JSON),
        (b"[]", Reason.NOT_AN_OBJECT),
        (b'{"release": 1, "port": 8000}', Reason.NOT_RELEASED),
        (b'{"release": false, "port": 8000}', Reason.NOT_RELEASED),
        (b'{"release": true, "port": true}', Reason.BAD_PORT),
        (b'{"release": true, "port": 0}', Reason.BAD_PORT),
        (b'{"release": true, "port": 65536}', Reason.BAD_PORT),
        (b'{"release": true, "port": 8000.0}', Reason.BAD_PORT),
        (b" " * (protocol.MAX_FILE_BYTES + 1), Reason.TOO_LARGE),
    ],
    ids=lambda v: v if isinstance(v, str) else v[:40].decode(),
)
async def test_a_bad_marker_ends_it_before_it_reloads(case: Case, marker: bytes, reason: str) -> None:
    case.engine.release = marker
    assert (await case.fails()).reason == reason
    assert "renew" not in case.engine.calls


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
async def test_a_marker_that_is_no_file_ends_it_before_it_reloads(case: Case, kind: str) -> None:
    case.engine.release = None
    path = case.directory / protocol.RELEASE
    if kind == "symlink":
        (case.directory / "good").write_text(json.dumps({**RELEASE, "port": case.port}))
        path.symlink_to("good")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert (await case.fails()).reason == Reason.NOT_REGULAR_FILE
    assert "renew" not in case.engine.calls


async def test_a_port_that_is_taken(case: Case) -> None:
    with socket.create_server(("127.0.0.1", case.port)):
        error = await case.fails()
    assert error.reason == Reason.BIND_FAILED
    assert str(case.port) in error.message
    assert "serve" not in case.engine.calls


async def test_an_http_server_that_ends_before_it_serves(case: Case) -> None:
    """uvicorn returns without a word if the application does not start."""
    case.engine.serves = False
    assert (await case.fails()).reason == Reason.ENGINE_FAILED


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 200])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(EngineError) as e:
        bind(host, free_port())
    assert e.value.reason == Reason.BIND_FAILED


def test_binding_waits_for_no_time_wait() -> None:
    with bind(None, free_port()) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert listener.family == socket.AF_INET
    with bind("::1", free_port()) as listener:
        assert listener.family == socket.AF_INET6


# --- the command line ---

FILES = ["--ready-file", "/c/ready.json", "--release-file", "/c/release.json"]


def test_vllms_command_line_is_understood() -> None:
    options = parse_options([*FILES, "--release-timeout-s", "60", "--", "org/model", "--port", "1", "--", "x"])
    assert options.release_timeout_s == 60
    assert options.engine_args == ["org/model", "--port", "1", "--", "x"]
    assert parse_options(FILES).release_timeout_s == 900
    assert parse_options([*FILES, "org/model", "--dtype", "auto"]).engine_args == ["org/model", "--dtype", "auto"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--ready-file", "/c/r"],
        [*FILES, "--release-timeout-s", "0"],
        [*FILES, "--release-timeout-s", "nan"],
        [*FILES, "--release-timeout-s", "x"],
        [*FILES, "--port", "0"],
        [*FILES, "--port", "65536"],
    ],
)
def test_a_bad_command_line(argv: list[str]) -> None:
    with pytest.raises(EngineError) as e:
        parse_options(argv)
    assert e.value.reason == Reason.BAD_ARGUMENTS


@pytest.mark.parametrize("name", ["nothing", "no.such:create", "small:nothing", ""])
def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(engines.ENGINE, name or ":")
    with pytest.raises(EngineError) as e:
        engines.load([], barrier=True)
    assert e.value.reason == Reason.BAD_ARGUMENTS


def test_every_reason_has_an_exit_code_of_its_own() -> None:
    reasons = {v for k, v in vars(Reason).items() if k.isupper()}
    assert set(EXIT_CODES) == reasons
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert not set(EXIT_CODES.values()) & {0, 1, 2, 78, 126, 127}


# --- the process ---


class Process:
    """The server with the small engine, as its own session."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self, *args: str, options: tuple[str, ...] = (), notice_s: float = 0) -> None:
        files = ["--ready-file", str(self.directory / "ready.json"), "--release-file", str(self.directory / "release.json")]
        argv = [sys.executable, "-m", "vllmsnapshot_child.server", *files, *options, "--", *args]
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": PATH,
            "VLLMSNAPSHOT_INCARNATION": "here",
            "TMPDIR": str(self.directory),
            "VLLMSNAPSHOT_ENGINE": "small:create",
            "SMALL_SHM": str(self.directory),
            "VLLMSNAPSHOT_CONTROL_DIR": str(self.directory),
            "VLLMSNAPSHOT_NOTICE_S": str(notice_s),
        }
        with (self.directory / "log").open("wb") as log:
            self.popen = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def session(self) -> list[int]:
        assert self.popen is not None
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(name)) == self.popen.pid and alive(int(name)):
                    found.append(int(name))
        return found

    def file(self, name: str) -> dict[str, Any]:
        path = self.directory / name

        def look() -> bool:
            assert self.popen is not None
            assert path.exists() or self.popen.poll() is None, (self.directory / "log").read_text()
            return path.exists()

        until(look, name)
        value: dict[str, Any] = json.loads(path.read_text())
        return value

    def release(self, **change: Any) -> None:
        with protocol.open_dir(str(self.directory)) as fd:
            protocol.write(fd, "release.json", {"release": True, "host": "127.0.0.1", "port": self.port, **change})

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def ends(self, code: int) -> None:
        """It ends with this code, and nothing of it is left (what it killed may take a moment longer than itself)."""
        assert self.popen is not None
        assert self.popen.wait(30) == code, (self.directory / "log").read_text()
        until(lambda: not self.session(), "the end of the whole session")

    def close(self) -> None:
        if self.popen is not None:
            for pid in self.session():
                os.kill(pid, signal.SIGKILL)
            self.popen.kill()
            self.popen.wait()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with contextlib.closing(Process(tmp_path)) as it:
        yield it


def test_at_the_barrier_no_inet_socket_is_left_and_sigterm_ends_the_tree(process: Process) -> None:
    process.start()
    process.file("ready.json")
    tree = process.session()
    assert len(tree) == 2
    sockets = {line.split()[9] for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]}
    for pid in tree:
        held = {os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()}
        assert not held & {f"socket:[{inode}]" for inode in sockets}
    process.stop()
    process.ends(128 + signal.SIGTERM)


@pytest.fixture
def told(case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A server that is told to end as soon as it serves, with 1.2 s of grace and 0.1 s of notice."""
    monkeypatch.setenv(protocol.TERM_GRACE, "1.2")
    monkeypatch.setenv(NOTICE, "0.1")

    async def end(engine: Recorder) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await engine.stopped.wait()

    case.engine.told = end
    yield case
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)


@pytest.mark.parametrize("fault", [None, RuntimeError("the engine is dead")])
async def test_an_attended_end_whatever_the_engine_says(told: Case, fault: Exception | None) -> None:
    told.engine.release = json.dumps({**RELEASE, "port": told.port, "incarnation": "there", "attend_end": True}).encode()
    if fault is not None:
        told.engine.fails["finish"] = fault
    await told.run()
    end = ["leave", "finish", "drop", "stop"] if fault is None else ["leave", "finish", "stop"]
    assert told.engine.calls[-len(end) - 1 :] == ["serve", *end]
    assert told.engine.limit_s == pytest.approx(0.7 * 1.2 - 0.1)
    ending = told.file(protocol.ENDING)
    assert (ending["incarnation"], ending["exit_code"]) == ("there", 0)
    assert 0 < ending["timeout_s"] <= 0.2, "the margin is left of the grace time"


@pytest.mark.parametrize("fault", [None, RuntimeError("the engine is dead")])
async def test_an_end_that_is_not_attended_has_the_whole_grace_time_for_requests(told: Case, fault: Exception | None) -> None:
    if fault is not None:
        told.engine.fails["leave"] = fault
    await told.run()
    end = ["leave", "finish", "stop"] if fault is None else ["leave", "stop"]
    assert told.engine.calls[-len(end) - 1 :] == ["serve", *end]
    if fault is None:
        assert told.engine.limit_s == pytest.approx(1.2 - 1.0 - 0.1)
    assert not (told.directory / protocol.ENDING).exists()


def test_serving_json_comes_once_connections_are_accepted_and_sigterm_is_a_clean_end(process: Process) -> None:
    process.start()
    process.file("ready.json")
    process.release()
    process.file("serving.json")
    socket.create_connection(("127.0.0.1", process.port)).close()
    process.stop()
    process.ends(0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("start=raise", Reason.ENGINE_FAILED),
        ("rehearsal=wrong", Reason.REHEARSAL_MISMATCH),
        ("answer=wrong", Reason.CANARY_MISMATCH),
        ("reload=raise", Reason.RELOAD_FAILED),
    ],
)
def test_a_failure_is_written_down_and_leaves_no_process(process: Process, fault: str, reason: str) -> None:
    process.release()
    process.start("--fault", fault)
    process.ends(EXIT_CODES[reason])
    failed = process.file("failed.json")
    assert (failed["reason"], failed["incarnation"]) == (reason, "here")
    assert not (process.directory / "serving.json").exists()
    assert reason in (process.directory / "log").read_text()


def test_a_bad_marker_has_its_own_exit_code(process: Process) -> None:
    process.release(port=0)
    process.start()
    process.ends(EXIT_CODES[Reason.BAD_PORT])
    assert process.file("failed.json")["reason"] == Reason.BAD_PORT


def test_a_taken_port_has_its_own_exit_code(process: Process) -> None:
    """Without a barrier it is found before the engine starts: a minute of a cold start would end in the same way."""
    with socket.create_server(("127.0.0.1", process.port)):
        process.start("--fault", "start=hang", options=("--unattended", "--host", "127.0.0.1", "--port", str(process.port)))
        process.ends(EXIT_CODES[Reason.BIND_FAILED])


def test_an_engine_that_exits_by_itself_takes_nothing_with_it(process: Process) -> None:
    process.release()
    process.start("--fault", "serve=exit")
    assert process.popen is not None
    assert process.popen.wait(30) == 17
    # The helper of the small engine notices the end of its link; in a container, init would have killed it.
    until(lambda: process.session() == [], "the helper's end")


def test_bad_arguments_of_the_server_itself(process: Process) -> None:
    process.start(options=("--port", "0"))
    process.ends(EXIT_CODES[Reason.BAD_ARGUMENTS])


async def test_serving_json_tells_the_answer_given_after_the_release_not_the_recorded_one(case: Case) -> None:
    # The agent compares it with what it has on its disk; a copy of the recorded answer would prove nothing.
    recorded = case.engine.canary

    async def canary(prompt: Prompt) -> Oracle:
        answer = await recorded(prompt)
        after = "renew" in case.engine.calls
        return Oracle(**{**answer.to_dict(), "sampled_token_logprob": -0.5004 if after else -0.5})

    case.engine.canary = canary  # type: ignore[method-assign]
    await case.run()
    assert case.file(protocol.READY)["sampled_token_logprob"] == -0.5
    assert case.file(protocol.SERVING)["oracle"]["sampled_token_logprob"] == -0.5004
