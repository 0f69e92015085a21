"""A small engine for tests: standard library only, up in milliseconds, yet with everything that makes a real engine's
process tree hard to move.

    VLLMSNAPSHOT_ENGINE=small:create  PYTHONPATH=…/tests/node/engine

Two processes, several threads, a unix socket between them, POSIX shared memory, a listening inet socket (which has to be
parked), memory that is dropped and reloaded, and memory that only the image holds; with a GPU (tests/gpu/device.py lies beside
this file then) both kinds there too. Every answer is computed from all of it: one changed byte anywhere and the canary differs.

Arguments (unknown ones, such as --model, are vLLM's and ignored):

    --cold-start-s SECONDS    how long `start` takes at least
    --memory-mib MIB          size of each kind of memory, default 2
    --abstract-socket         listen on an abstract unix socket of the same name in every replica
    --gpu                     weights, and memory that only the image holds, are on a GPU
    --token-s SECONDS         how long each token of an HTTP answer takes, default 0
    --fault PHASE=HOW         PHASE: start canary release rehearsal prebuild park trim renew reload answer serve
                              HOW: raise, exit (code 17), finish (code 0), hang; for rehearsal and answer also: wrong (another answer)

A fault may also be named later, in the file `fault` of the control directory: so a restored copy can fail where the
original did not. HTTP: GET /health /v1/models /metrics, POST /v1/completions (`until`: answered once that file is there),
POST /crash (exit code 17; `how`: finish for code 0, memory for as much of it as the kernel allows), POST /self (what it finds in the `env` and `files` that are named, and what both processes draw at random).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import mmap
import os
import queue
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllmsnapshot_child import drain, entropy, memory
from vllmsnapshot_child.engine import Dropped, EngineError, Reload
from vllmsnapshot_child.oracle import Prompt
from vllmsnapshot_child.protocol import Oracle, Reason

CRASH_CODE = 17
WORDS = (" Paris", " London", " Rome", " Berlin", " Madrid", " Lisbon", " Vienna", " Prague")
MIB = 1 << 20
RENEW, DRAW = b"renew", b"draw"  # to the helper


def pattern(seed: int, size: int) -> bytes:
    """The same bytes each time: this engine's checkpoint."""
    return random.Random(seed).randbytes(size)


class Shared:
    """A file in /dev/shm, mapped; the name goes to the helper. (SMALL_SHM: elsewhere, where /dev/shm is the machine's.)"""

    def __init__(self, size: int, name: str | None = None) -> None:
        self.name = name or f"{os.environ.get('SMALL_SHM', '/dev/shm')}/small-{os.urandom(6).hex()}"
        fd = os.open(self.name, os.O_RDWR | (os.O_CREAT | os.O_EXCL if name is None else 0), 0o600)
        try:
            if name is None:
                os.ftruncate(fd, size)
            self.map = mmap.mmap(fd, size)
        finally:
            os.close(fd)


class Gpu:
    """Weights, which are given back and loaded again, and memory that is not, on the first GPU."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.device = importlib.import_module("device").Device()
        self.kept = self.device.allocate(size)
        self.device.write(self.kept, pattern(5, size))
        self.weights: int | None = None
        self.load()

    def load(self) -> None:
        """Put the weights there."""
        if self.weights is None:
            self.weights = self.device.allocate(self.size)
        self.device.write(self.weights, pattern(6, self.size))

    def release(self) -> None:
        """Give the weights' memory back."""
        self.device.free(self.weights)
        self.weights = None

    def checksum(self, total: int) -> int:
        """Add what is on the GPU to a checksum. From any thread."""
        self.device.use()
        for at in (self.kept, self.weights):
            total = zlib.crc32(self.device.read(at, self.size), total)
        return total


def draw() -> str:
    """A number and a key, from generators in the memory of this process."""
    return json.dumps([random.random(), ssl.RAND_bytes(16).hex()])


def helper(path: str, shared_name: str, size: int) -> None:
    """The second process: adds the checksums of its own and of the shared memory to what it is asked."""
    kept = pattern(3, size)
    shared = Shared(size, shared_name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(path)
        while request := link.recv(4096):
            if request in (RENEW, DRAW):
                if request == RENEW:
                    entropy.renew()
                link.sendall(draw().encode())
                continue
            total = zlib.crc32(shared.map[:], zlib.crc32(kept, zlib.crc32(request)))
            link.sendall(b"%d\n" % total)


class SmallEngine:
    """Implements `vllmsnapshot_child.engine.Engine`."""

    weights_on_device = False

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.size = options.memory_mib * MIB
        self.phase = "start"
        self.released = False
        self.dropped = False
        self.requests = 0
        self.traffic = drain.Traffic()
        self.stopped = asyncio.Event()
        self.told = False
        self.lock = threading.Lock()
        self.jobs: queue.Queue[tuple[bytes, queue.Queue[int | None]]] = queue.Queue()

    # --- the Engine protocol ---

    async def start(self) -> None:
        began = time.monotonic()
        self.fault("start")
        self.weights = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.weights[:] = self.checkpoint()
        self.kept = bytearray(pattern(2, self.size))
        self.gpu = Gpu(self.size) if self.options.gpu else None
        self.shared = Shared(self.size)
        self.shared.map[:] = pattern(4, self.size)
        self.directory = tempfile.mkdtemp(prefix="small-")
        path = os.path.join(self.directory, "link")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1)
            helper_argv = [sys.executable, __file__, path, self.shared.name, str(self.size)]
            self.child = subprocess.Popen(helper_argv)  # noqa: ASYNC220  nothing else runs in the loop yet
            listener.settimeout(60)
            self.link, _ = listener.accept()
            self.link.settimeout(None)
        if self.options.abstract_socket:
            # Like the one of each CUDA process.
            self.abstract = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.abstract.bind("\0cuda-uvmfd-small")
            self.abstract.listen(1)
        # Like the sockets of gloo: nobody ever connects, and the barrier has to get rid of it.
        self.useless = socket.create_server(("127.0.0.1", 0))
        for _ in range(2):
            threading.Thread(target=self.work, daemon=True).start()
        threading.Thread(target=self.tick, daemon=True).start()
        await asyncio.sleep(max(0.0, self.options.cold_start_s - (time.monotonic() - began)))

    async def canary(self, prompt: Prompt) -> Oracle:
        phase = {"prebuild": "rehearsal", "reload": "answer"}.get(self.phase, "canary")
        wrong = self.fault(phase)
        return self.answer(prompt.text, prompt.tokens, salt=b"wrong" if wrong else b"")

    async def prebuild(self) -> None:
        self.fault("prebuild")

    async def release_state(self, *, weights: bool) -> Dropped:
        self.fault("release")
        self.dropped = weights
        if not weights:
            return Dropped()
        self.weights.madvise(mmap.MADV_DONTNEED)
        if self.gpu is not None:
            self.gpu.release()
        return Dropped(weights=len(self.weights))

    async def restore_state(self) -> Reload:
        self.phase = "reload" if self.released else "prebuild"
        self.fault("reload" if self.released else "rehearsal")
        began = time.monotonic()
        if self.dropped:
            self.weights[:] = self.checkpoint()
            if self.gpu is not None:
                self.gpu.load()
        return Reload(seconds=time.monotonic() - began if self.dropped else 0.0)

    async def park(self) -> list[str]:
        self.fault("park")
        return memory.park_listeners()

    async def trim(self) -> None:
        self.fault("trim")
        memory.trim_heap()

    async def renew(self, env: Mapping[str, str]) -> None:
        self.released = True
        self.fault("renew")
        os.environ.update(env)
        entropy.renew()
        self.ask_helper(RENEW)

    def ask_helper(self, request: bytes) -> bytes:
        """One exchange with the second process. Raises OSError or gives nothing when it has ended."""
        with self.lock:
            self.link.sendall(request)
            return self.link.recv(4096)

    async def serve(self, listener: socket.socket, host: str | None, port: int, serving: Callable[[], None]) -> None:
        self.fault("serve")
        server = Web((host or "", port), handler(self, port), bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        self.http = server
        # As vLLM does: without its second process it does not go on.
        loop = asyncio.get_running_loop()
        threading.Thread(target=lambda: (self.child.wait(), loop.call_soon_threadsafe(self.stopped.set)), daemon=True).start()
        serving()
        await self.stopped.wait()
        server.shutdown()
        await self.close()
        if not self.told:
            raise RuntimeError("the helper has ended")

    def leave(self) -> None:
        self.traffic.last = True

    async def finish(self, limit_s: float) -> None:
        await asyncio.to_thread(self.http.shutdown)
        self.http.socket.close()
        print(f"not listening any more: {self.traffic.running} requests run", flush=True)
        await drain.answered(self.traffic, lambda: self.http.connections, limit_s)

    async def drop(self) -> None:
        await self.release_state(weights=True)

    def stop(self) -> None:
        self.told = True
        self.stopped.set()

    async def close(self) -> None:
        self.link.close()
        self.child.wait(5)
        for path in (self.shared.name, os.path.join(self.directory, "link")):
            with contextlib.suppress(OSError):
                os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)

    # --- the model ---

    def checkpoint(self) -> bytes:
        """The weights. A file `seed` in the model's directory makes them another model's."""
        seed = 1
        with contextlib.suppress(OSError), open(os.path.join(self.options.model, "seed"), encoding="ascii") as f:
            seed = int(f.read())
        return pattern(seed, self.size)

    def answer(self, prompt: str, tokens: int, salt: bytes = b"") -> Oracle:
        """The greedy answer; it depends on every byte of both processes."""
        done: queue.Queue[int | None] = queue.Queue()
        self.jobs.put((salt + prompt.encode(), done))
        number = done.get(timeout=30)
        if number is None:
            raise RuntimeError("the helper has ended")
        self.requests += 1
        ids = [(number >> (3 * i)) % len(WORDS) for i in range(tokens)]
        return Oracle(
            token_ids=ids, text="".join(WORDS[i] for i in ids), sampled_token_logprob=-(number % 9973) / 1000, prompt=prompt
        )

    def work(self) -> None:
        """A worker thread."""
        while True:
            request, done = self.jobs.get()
            total = zlib.crc32(self.weights[:], zlib.crc32(self.kept, zlib.crc32(request)))
            if self.gpu is not None:
                total = self.gpu.checksum(total)
            reply = b""
            with contextlib.suppress(OSError):
                reply = self.ask_helper(b"%d" % total)
            # The helper ends first when the whole session is told to: no answer then, rather than a wrong one.
            done.put(int(reply) if reply else None)

    def whoami(self, request: dict[str, list[str]]) -> dict[str, Any]:
        """What this process finds now of what distinguishes one pod from another."""
        files = dict.fromkeys(request.get("files", []), "")
        for path in files:
            with contextlib.suppress(OSError), open(path, encoding="utf-8") as f:
                files[path] = f.read()
        return {
            "env": {name: os.environ.get(name) for name in request.get("env", [])},
            "files": files,
            "hostname": socket.gethostname(),
            "drawn": [json.loads(draw()), json.loads(self.ask_helper(DRAW))],
        }

    def tick(self) -> None:
        """Proof in the log that the process runs, and that the log goes on after a restore."""
        for n in range(1 << 30):
            print(f"tick {n}", flush=True)
            time.sleep(1)

    def fault(self, phase: str) -> bool:
        """Fail here if so ordered. True: give a wrong answer."""
        orders = [*self.options.fault]
        with contextlib.suppress(OSError), open(os.path.join(self.options.control, "fault"), encoding="utf-8") as f:
            orders += f.read().split()
        for order in orders:
            where, _, how = order.partition("=")
            if where != phase:
                continue
            if how == "wrong":
                return True
            if how == "exit":
                os._exit(CRASH_CODE)
            if how == "finish":
                os._exit(0)
            if how == "hang":
                print(f"hangs in {phase}", flush=True)
                signal.pause()
            raise RuntimeError(f"ordered to fail in {phase}")
        return False


def crash(how: str) -> None:
    """End this process, without a word to anybody."""
    if how == "memory":
        eaten = []
        while True:
            eaten.append(b"x" * (32 * MIB))
    os._exit(0 if how == "finish" else CRASH_CODE)


class Web(ThreadingHTTPServer):
    """Counts its open connections."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.connections = 0
        self.lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.connections += 1
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.lock:
                self.connections -= 1


def handler(engine: SmallEngine, port: int) -> type[BaseHTTPRequestHandler]:
    """The HTTP side."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5  # of a connection without a request, as vLLM's

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(b"", "text/plain")
            elif self.path == "/v1/models":
                self.reply_json({"object": "list", "data": [{"id": engine.options.model, "object": "model"}]})
            elif self.path == "/metrics":
                text = f"# TYPE small_requests_total counter\nsmall_requests_total {engine.requests}\n"
                text += f"# TYPE small_answering gauge\nsmall_answering {engine.traffic.running}\n"
                self.reply(text.encode(), "text/plain; version=0.0.4")
            else:
                self.reply_json({"error": "not found"}, 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path == "/crash":
                crash(str(json.loads(body or b"{}").get("how", "exit")))
            if self.path == "/self":
                self.reply_json(engine.whoami(json.loads(body)))
                return
            if self.path != "/v1/completions":
                self.reply_json({"error": "not found"}, 404)
                return
            with engine.traffic.request():
                self.complete(body)

        def complete(self, body: bytes) -> None:
            try:
                request = json.loads(body)
                prompt, tokens, stream = str(request["prompt"]), int(request.get("max_tokens", 16)), bool(request.get("stream"))
            except (ValueError, KeyError, TypeError) as e:
                self.reply_json({"error": str(e)}, 400)
                return
            while (until := request.get("until")) and not os.path.exists(until):
                time.sleep(0.01)
            try:
                oracle = engine.answer(prompt, tokens)
            except (RuntimeError, queue.Empty) as e:
                self.reply_json({"error": str(e)}, 503)
                return
            if stream:
                self.reply_stream([WORDS[number] for number in oracle.token_ids])
                return
            time.sleep(engine.options.token_s * tokens)
            first = WORDS[oracle.token_ids[0]]
            choice = {
                "index": 0,
                "text": oracle.text,
                "finish_reason": "length",
                "logprobs": {"tokens": [first], "token_logprobs": [oracle.sampled_token_logprob]},
                "token_ids": oracle.token_ids,
            }
            where = {"pid": os.getpid(), "port": port, "hostname": os.environ.get("HOSTNAME", "")}
            self.reply_json({"object": "text_completion", "model": engine.options.model, "choices": [choice], **where})

        def reply_json(self, value: dict[str, Any], status: int = 200) -> None:
            self.reply(json.dumps(value).encode(), "application/json", status)

        def reply(self, body: bytes, kind: str, status: int = 200) -> None:
            self.begin(kind, "content-length", str(len(body)), status)
            self.wfile.write(body)

        def reply_stream(self, words: list[str]) -> None:
            self.begin("text/event-stream", "transfer-encoding", "chunked")
            for word in words:
                time.sleep(engine.options.token_s)
                self.chunk(json.dumps({"choices": [{"index": 0, "text": word}]}))
            self.chunk("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

        def chunk(self, event: str) -> None:
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def begin(self, kind: str, framing: str, value: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header(framing, value)
            if engine.traffic.last:
                self.send_header("connection", "close")
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            pass

    return Handler


def create(args: list[str]) -> SmallEngine:
    """Factory for VLLMSNAPSHOT_ENGINE."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--model", default="small")
    parser.add_argument("--cold-start-s", type=float, default=0.0)
    parser.add_argument("--memory-mib", type=int, default=2)
    parser.add_argument("--abstract-socket", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[])
    try:
        options, _ = parser.parse_known_args(args)
    except argparse.ArgumentError as e:
        raise EngineError(Reason.BAD_ARGUMENTS, str(e)) from e
    options.control = os.environ.get("VLLMSNAPSHOT_CONTROL_DIR", "/run/vllmsnapshot")
    return SmallEngine(options)


if __name__ == "__main__":
    helper(sys.argv[1], sys.argv[2], int(sys.argv[3]))
