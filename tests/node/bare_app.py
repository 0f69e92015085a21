"""A tree like vLLM's in miniature, for dumps: threads, a spawned child, semaphores and shared memory, a pipe, a unix socket, a lock,
a deleted file, a file mapped from the root file system. Runs in a bare container (see bare.py).

`bare_app.py CONTROL MEGABYTES [TROUBLE]`: whenever a file CONTROL/ask appears, answers with one line of JSON on stdout. CONTROL/draw:
what both processes draw at random; CONTROL/renew: after they got fresh entropy, as the engine's processes do at the release.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import multiprocessing
import multiprocessing.synchronize
import os
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

STATE = Path("/var/lib/bare/state")


def draw(*, renew: bool) -> dict[str, Any]:
    """One draw from each generator that lives in this process's memory."""
    if renew:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "child"))
        from vllmsnapshot_child import entropy

        entropy.renew()
    names: Any = tempfile
    return {
        "random": random.random(),
        "openssl": ssl.RAND_bytes(16).hex(),
        "file name": next(names._get_candidate_names()),
        "semaphore": names_of_semaphores(),
        "node of uuid1": uuid.uuid1().node,
    }


def names_of_semaphores() -> str:
    """What multiprocessing would call the next one."""
    semaphores: Any = multiprocessing.synchronize.SemLock
    return str(semaphores._make_name())


def child(connection: Any, done: Any, name: str) -> None:
    """Count in shared memory, once a request."""
    memory = shared_memory.SharedMemory(name)
    buffer: Any = memory.buf
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(1)  # the parent was killed, and we are next; a trace would stand where the next tree's answer is looked for
        if request != "ask":
            connection.send(draw(renew=request == "renew"))
            continue
        buffer[0] += 1
        done.release()


def serve(server: socket.socket) -> None:
    """Echo."""
    while True:
        peer, _ = server.accept()
        with peer:
            peer.sendall(peer.recv(100))


def main() -> None:
    """Set everything up, then answer."""
    control, megabytes = Path(sys.argv[1]), int(sys.argv[2])
    trouble = sys.argv[3] if len(sys.argv) > 3 else ""
    pattern = os.urandom(1 << 20) * megabytes
    STATE.parent.mkdir(parents=True, exist_ok=True)
    STATE.write_bytes(b"state" * 1000)
    with STATE.open("rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    lock = open("/tmp/lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    deleted = open("/tmp/deleted", "w+b")  # noqa: SIM115
    deleted.write(b"deleted" * 300_000)
    deleted.flush()
    os.unlink("/tmp/deleted")
    server = socket.socket(socket.AF_UNIX)
    server.bind("/tmp/socket")
    server.listen()
    ticks = [0]

    def tick() -> None:
        while True:
            ticks[0] += 1
            time.sleep(0.01)

    threads = [threading.Thread(target=f, args=a, daemon=True) for f, a in ((serve, (server,)), (tick, ()))]
    for thread in threads:
        thread.start()
    spawn = multiprocessing.get_context("spawn")
    memory = shared_memory.SharedMemory(create=True, size=32 << 20)
    buffer: Any = memory.buf
    done = spawn.Semaphore(0)
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=child, args=(theirs, done, memory.name), daemon=True)
    process.start()
    extra: list[Any] = []
    if trouble == "listen":
        extra.append(socket.create_server(("127.0.0.1", 0)))
    elif trouble == "udp":
        extra.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        extra[0].bind(("0.0.0.0", 0))
    elif trouble == "unbound":
        extra.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    elif trouble == "session":
        extra.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))
    elif trouble == "orphan":
        subprocess.run(["sh", "-c", "sleep 1000 &"], check=True)
    print("up", flush=True)
    requests = [control / name for name in ("ask", "draw", "renew")]
    while True:
        request = next((path for path in requests if path.exists()), None)
        if request is None:
            time.sleep(0.005)
            continue
        request.unlink()
        if request.name != "ask":
            ours.send(request.name)
            print(json.dumps({"parent": draw(renew=request.name == "renew"), "child": ours.recv()}), flush=True)
            continue
        before = ticks[0]
        ours.send("ask")
        done.acquire()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("/tmp/socket")
            client.sendall(b"hello")
            echo = client.recv(100).decode()
        while ticks[0] == before:
            time.sleep(0.001)
        deleted.seek(0)
        answer = {
            "pid": os.getpid(),
            "child": process.pid,
            "pattern": hashlib.sha256(pattern).hexdigest(),
            "deleted": len(deleted.read()),
            "mapped": hashlib.sha256(mapped).hexdigest(),
            "counter": buffer[0],
            "echo": echo,
            "host": socket.gethostname(),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
