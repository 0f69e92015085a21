"""The engine server behind a barrier: `python -m vllmsnapshot_child.server OPTIONS -- VLLM-SERVE-ARGUMENTS…`.

Brings the engine up, proves that it can drop and reload its state without changing an answer, makes itself small and free
of addresses, writes the ready file and waits. In that state the node agent may dump it any number of times. When the release
file appears, here or in another pod, it reloads, proves itself again, and only then binds a port.

Options, ready fields and release marker are those of vLLM's own `python -m vllm.snapshot.server`; `--unattended`, `--host`
and `--port` are ours (no barrier). Whatever goes wrong ends with failed.json, one of `protocol.EXIT_CODES`, and every process of the
tree gone: never with a half-open server.

It runs on asyncio's own event loop. vLLM's uvloop opens an io_uring (wherever the seccomp profile lets it), which CRIU
cannot dump; and a loop that is picked by a sandbox profile would make images differ between clusters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from vllmsnapshot_child import drain, environment, memory, oracle, procs, protocol, weights
from vllmsnapshot_child.engine import Engine, EngineError, load
from vllmsnapshot_child.protocol import Oracle, ProtocolError, Reason
from vllmsnapshot_child.settings import seconds

POLL_S = 0.05

END_MARGIN_S = 1.0
"""Of the grace time, left for an end without the agent."""


@dataclass(kw_only=True)
class Options:
    """What stands before the `--`."""

    ready_file: str
    release_file: str
    release_timeout_s: float = 900.0
    unattended: bool = False
    host: str | None = None
    port: int = 8000
    engine_args: list[str] = field(default_factory=list)


def parse_options(argv: list[str]) -> Options:
    """Parse the command line. Raises EngineError(BadArguments)."""
    if "--" in argv:
        cut = argv.index("--")
        argv, engine_args = argv[:cut], argv[cut + 1 :]
    else:
        engine_args = []  # vLLM's child takes what it does not know as arguments of the engine, and so does this one
    parser = argparse.ArgumentParser(prog="vllmsnapshot_child.server", add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--ready-file", required=True)
    parser.add_argument("--release-file", required=True)
    parser.add_argument("--release-timeout-s", type=float, default=900.0)
    parser.add_argument("--unattended", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    try:
        known, rest = parser.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit) as e:
        raise EngineError(Reason.BAD_ARGUMENTS, str(e)) from e
    if not known.release_timeout_s > 0:
        raise EngineError(Reason.BAD_ARGUMENTS, "--release-timeout-s must be positive")
    if not 1 <= known.port <= 65535:
        raise EngineError(Reason.BAD_ARGUMENTS, "--port must be in 1..65535")
    return Options(**vars(known), engine_args=rest + engine_args)


class Control:
    """The control directory, as the server uses it."""

    def __init__(self, options: Options) -> None:
        self.ready = os.path.abspath(options.ready_file)
        self.release = os.path.abspath(options.release_file)
        self.incarnation = os.environ.get("VLLMSNAPSHOT_INCARNATION", "")

    def put(self, message: protocol.Message, path: str | None = None) -> None:
        """Write a file next to the release file (or at `path`)."""
        directory, name = os.path.split(path or os.path.join(os.path.dirname(self.release), message.FILE))
        with protocol.open_dir(directory) as fd:
            protocol.write(fd, name, message.to_dict())

    def released(self) -> protocol.Release | None:
        """The release marker, None as long as there is no such file. Raises ProtocolError for one that is not as it must be.

        Its incarnation is not compared: a restored server is given that of another pod, and takes it as its own.
        """
        directory, name = os.path.split(self.release)
        with protocol.open_dir(directory) as fd:
            raw = protocol.read(fd, name)
        return None if raw is None else protocol.Release.from_dict(raw)

    def restore_bytes_per_s(self) -> int | None:
        """What the agent says of earlier restores on this node; None if it says nothing, or nothing that can be believed."""
        try:
            with protocol.open_dir(os.path.dirname(self.release)) as fd:
                start = protocol.Start.load(fd, self.incarnation)
        except (OSError, ProtocolError) as e:
            log(f"ignored: {e}")
            return None
        return None if start is None else start.restore_bytes_per_s


class Server:
    """One life: engine, barrier, service."""

    def __init__(self, options: Options, control: Control, create: Callable[..., Engine] = load) -> None:
        self.options = options
        self.control = control
        self.create = create
        self.started_with = dict(os.environ)  # the engine changes its own
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str, reason: str = Reason.ENGINE_FAILED) -> Iterator[None]:
        """Take the time of a step; an exception out of the engine in it becomes EngineError(reason)."""
        began = time.monotonic()
        try:
            yield
        except (EngineError, ProtocolError):
            raise
        except (Exception, SystemExit) as e:
            raise EngineError(reason, f"{name}: {type(e).__name__}: {e}") from e
        finally:
            self.phases[name] = round(time.monotonic() - began, 4)

    async def run(self) -> None:
        """Until the server is told to end. Raises EngineError or ProtocolError."""
        # Without a barrier the port is taken first, as vLLM itself does: one that somebody has costs no cold start.
        listener = self.bind(self.options.host, self.options.port) if self.options.unattended else None
        with self.phase("import_s"):
            engine = self.create(self.options.engine_args, barrier=not self.options.unattended)
        with self.phase("engine_s"):
            await engine.start()
        with self.phase("canary_s", Reason.CANARY_FAILED):
            first = await engine.canary(oracle.FIRST)
            more = [] if self.options.unattended else [await engine.canary(p) for p in oracle.MORE]
        if listener is not None:
            await self.serve(engine, listener, self.options.host, self.options.port, first, since=None)
            return
        more = await self.prepare(engine, first, more)
        release = await self.barrier()
        began = time.monotonic()
        self.control.incarnation = release.incarnation or self.control.incarnation
        if release.attend_end:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.end_early)
        answer = await self.prove(engine, release, first, more)
        listener = self.bind(release.host, release.port)
        await self.serve(engine, listener, release.host, release.port, answer, since=began, attend_end=release.attend_end)

    async def prepare(self, engine: Engine, first: Oracle, more: list[Oracle]) -> list[Oracle]:
        """Everything up to the ready file. Returns the further oracles that can be relied on."""
        policy = weights.policy()
        with self.phase("release_s", Reason.RELOAD_FAILED):
            dropped = await engine.release_state(weights=policy != weights.KEEP)
        with self.phase("rehearsal_s", Reason.RELOAD_FAILED):
            reload = await engine.restore_state()
            if difference := first.differs(await engine.canary(oracle.FIRST)):
                raise EngineError(Reason.REHEARSAL_MISMATCH, f"after a reload: {difference}")
            # The first answer decides. A longer one that an intact engine does not repeat is no use as a proof later.
            again = [await engine.canary(p) for p in oracle.MORE]
            more = [a for a, b in zip(more, again, strict=True) if a.differs(b) is None]
        facts = weights.Facts(
            bytes=dropped.weights,
            reload_s=reload.seconds,
            restore_bytes_per_s=self.control.restore_bytes_per_s(),
            room=memory.room() if engine.weights_on_device else None,
            fixed=reload.problem,
        )
        choice = weights.decide(policy, facts)
        log(f"weights: {choice.weights}: {choice.why}")
        with self.phase("prebuild_s"):
            await engine.prebuild()
        with self.phase("release_again_s", Reason.RELOAD_FAILED):
            freed = sum(await engine.release_state(weights=choice.weights == weights.DISCARD))
            parked = await engine.park()
            await engine.trim()
        log(f"at the barrier: {freed >> 20} MiB dropped, {len(parked)} listeners parked, {len(more)} further oracles")
        ready = protocol.Ready(
            incarnation=self.control.incarnation,
            token_ids=first.token_ids,
            text=first.text,
            sampled_token_logprob=first.sampled_token_logprob,
            more=[o.to_dict() for o in more],
            bytes_freed=freed,
            phases=dict(self.phases),
            weights=choice.weights,
            weights_reason=choice.why,
            protocol=protocol.PROTOCOL_VERSION,
        )
        self.control.put(ready, self.control.ready)
        return more

    async def barrier(self) -> protocol.Release:
        """Wait for the release marker.

        The limit counts slept seconds, as vLLM's does: time spent stopped, or as an image on a disk, does not count.
        """
        left = self.options.release_timeout_s
        with self.phase("barrier_s"):
            while (release := self.control.released()) is None:
                if left <= 0:
                    limit = self.options.release_timeout_s
                    raise EngineError(Reason.RELEASE_TIMEOUT, f"no {self.control.release} within {limit:g} s")
                await asyncio.sleep(min(POLL_S, left))
                left -= POLL_S
        return release

    async def prove(self, engine: Engine, release: protocol.Release, first: Oracle, more: list[Oracle]) -> Oracle:
        """Reload and compare; raises EngineError unless every answer is the recorded one.

        Returns the answer given now to the first prompt: the agent compares it once more, with what it has on its disk.
        """
        with self.phase("renew_s"):
            await engine.renew({**release.env, **environment.of_this_container(self.started_with)})
        with self.phase("reload_s", Reason.RELOAD_FAILED):
            await engine.restore_state()
        with self.phase("canary_after_s", Reason.CANARY_FAILED):
            prompts = {p.text: p for p in oracle.MORE}
            answers: list[Oracle] = []
            for recorded, prompt in [(first, oracle.FIRST), *((o, prompts[o.prompt]) for o in more)]:
                answers.append(await engine.canary(prompt))
                if difference := recorded.differs(answers[-1]):
                    raise EngineError(Reason.CANARY_MISMATCH, f"{prompt.text!r} after the release: {difference}")
        return answers[0]

    def bind(self, host: str | None, port: int) -> socket.socket:
        """See `bind`."""
        with self.phase("bind_s", Reason.BIND_FAILED):
            return bind(host, port)

    async def serve(
        self,
        engine: Engine,
        listener: socket.socket,
        host: str | None,
        port: int,
        answer: Oracle,
        since: float | None,
        *,
        attend_end: bool = False,
    ) -> None:
        """Listen and serve; serving.json once connections are accepted. Returns after the end (`end`)."""

        served = False

        def serving() -> None:
            nonlocal served
            served = True
            self.await_end(engine, attended=attend_end)
            if since is not None:
                self.phases["release_to_serving_s"] = round(time.monotonic() - since, 4)
            message = protocol.Serving(
                incarnation=self.control.incarnation, host=host, port=port, oracle=answer.to_dict(), phases=dict(self.phases)
            )
            try:
                self.control.put(message)
            except OSError as e:
                # Without a control volume (unattended) there is nobody to tell; the server serves all the same.
                log(f"cannot write {protocol.SERVING}: {e}")
            log(f"serving on {host or '*'}:{port}: {self.phases}")

        with listener:
            began = dict(self.phases)
            with self.phase("serve_s"):
                await engine.serve(listener, host, port, serving)
            self.phases = began
        if not served:
            raise EngineError(Reason.ENGINE_FAILED, "the HTTP server ended before it accepted a connection")

    # --- the end ---

    def await_end(self, engine: Engine, *, attended: bool) -> None:
        """Take the signals of the end from the engine: vLLM would end its processes first, and with them what they answer."""
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []

        def begin() -> None:
            if not tasks:
                tasks.append(loop.create_task(self.end(engine, attended=attended)))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, begin)

    async def end(self, engine: Engine, *, attended: bool) -> None:
        """Give notice, answer what was asked, and let the engine stop, all within the grace time.

        `attended`: before that give back what is on the device, and wait to be killed by the agent.
        """
        began = time.monotonic()
        grace = term_grace()
        limit = (1 - protocol.ENDING_FRACTION) * grace if attended else max(0.0, grace - END_MARGIN_S)
        notice = min(seconds(drain.NOTICE, drain.NOTICE_S, log), limit)
        try:
            async with asyncio.timeout(limit + 0.5 * (grace - limit)):
                engine.leave()
                log(f"told to end: serving on for {notice:g} s, then answering what runs")
                await asyncio.sleep(notice)
                await engine.finish(limit - notice)
                if attended:
                    await engine.drop()
        except Exception as e:  # whatever is wrong with the engine, it has to end
            log(f"before the end: {type(e).__name__}: {e}")
        left = min(protocol.ENDING_FRACTION * grace, began + grace - time.monotonic() - END_MARGIN_S)
        if attended and self.announce_end(0, left):
            await asyncio.sleep(left)
            log("nobody has ended us")
        engine.stop()

    def end_early(self, number: int, _frame: FrameType | None) -> None:
        """SIGTERM or SIGINT between release and service."""
        log(f"{signal.Signals(number).name} before serving")
        left = protocol.ENDING_FRACTION * term_grace()
        if self.announce_end(128 + number, left):
            time.sleep(left)
        die(128 + number)

    def announce_end(self, code: int, left: float) -> bool:
        """Tell the agent that it may end us within so many seconds; False if it is not worth while to wait."""
        if left <= 0:
            return False
        try:
            self.control.put(protocol.Ending(incarnation=self.control.incarnation, exit_code=code, timeout_s=left))
        except OSError as e:
            log(f"cannot write {protocol.ENDING}: {e}")
            return False
        return True


def bind(host: str | None, port: int) -> socket.socket:
    """A bound TCP socket, not yet listening: as vLLM's `create_server_socket`. Raises EngineError(BindFailed)."""
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a predecessor that linger in TIME_WAIT must not keep a replica down.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host or "", port))
    except (OSError, UnicodeError) as e:
        listener.close()
        raise EngineError(Reason.BIND_FAILED, f"port {port} on {host or 'all addresses'}: {e}") from e
    return listener


def term_grace() -> float:
    """Seconds from SIGTERM to init's SIGKILL."""
    return seconds(protocol.TERM_GRACE, protocol.TERM_GRACE_S, log)


def log(message: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError):
        os.write(2, f"vllmsnapshot-server: {message}\n".encode(errors="backslashreplace"))


def kill_tree() -> None:
    """SIGKILL our descendants, and the rest of our session if we lead one.

    Not only the children: a helper that lost its parent belongs to init already, but is still of our session.
    """
    pids = {p.pid for p in procs.others()}
    if os.getsid(0) == os.getpid():
        pids.update(procs.in_session(os.getpid()))
    procs.kill(pids)


def die(code: int) -> NoReturn:
    """End the whole tree at once. No interpreter clean-up: engines hang in it."""
    kill_tree()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def on_signal(number: int, _frame: FrameType | None) -> None:
    """SIGTERM and SIGINT before the server serves (from then on see `Server.end`).

    By default Python would end and leave the engine's processes behind.
    """
    log(f"{signal.Signals(number).name} before serving")
    die(128 + number)


def fail(failure: EngineError | ProtocolError, control: Control | None) -> NoReturn:
    """Say why, in the log and in failed.json, and end."""
    if failure.__cause__ is not None:
        traceback.print_exception(failure.__cause__)
    log(str(failure))
    if control is not None:
        message = failure.message[:4000].encode(errors="backslashreplace").decode()
        with contextlib.suppress(OSError):
            control.put(protocol.Failed(incarnation=control.incarnation, reason=failure.reason, message=message))
    die(protocol.EXIT_CODES.get(failure.reason, 1))


async def live(server: Server) -> NoReturn:
    """Run the server and end the process from inside the loop: leaving the loop would wait for the engine's tasks."""
    try:
        await server.run()
    except (EngineError, ProtocolError) as e:
        fail(e, server.control)
    die(0)


def main() -> NoReturn:
    """Entry point."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    control = None
    try:
        options = parse_options(sys.argv[1:])
        control = Control(options)
        asyncio.run(live(Server(options, control)))
    except EngineError as e:
        fail(e, control)
    except BaseException as e:  # also SystemExit: vLLM and uvicorn end the process where they see fit
        cause = EngineError(Reason.ENGINE_FAILED, f"{type(e).__name__}: {e}")
        cause.__cause__ = e
        fail(cause, control)


if __name__ == "__main__":
    main()
