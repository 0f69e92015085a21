"""The child with real vLLM, without Kubernetes and without CRIU: one engine start, then what only vLLM can show.

Runs where vLLM is installed: `VLLMSNAPSHOT_VLLM_PYTHON` is an interpreter that has it (also `VLLMSNAPSHOT_VLLM_PATH`, more of
its PYTHONPATH), `VLLMSNAPSHOT_TEST_MODEL` a model directory. Skipped elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.child_harness import ROOT, alive, free_port, until
from vllmsnapshot_child import oracle, protocol
from vllmsnapshot_child.protocol import EXIT_CODES, Reason

PYTHON = os.environ.get("VLLMSNAPSHOT_VLLM_PYTHON", "")
MODEL = os.environ.get("VLLMSNAPSHOT_TEST_MODEL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON and MODEL), reason="VLLMSNAPSHOT_VLLM_PYTHON, _TEST_MODEL not set"),
]
START_S = 600.0
ARGS = ("--served-model-name", "m", "--max-model-len", "512", "--enforce-eager", "--kv-cache-memory-bytes", "67108864")


class Vllm:
    """One server process with its files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self, *args: str) -> None:
        files = ("--ready-file", str(self.directory / "ready.json"), "--release-file", str(self.directory / "release.json"))
        path = os.pathsep.join(p for p in (str(ROOT / "child"), os.environ.get("VLLMSNAPSHOT_VLLM_PATH", "")) if p)
        settings = {"PYTHONPATH": path, "HOME": str(self.directory), "HF_HUB_OFFLINE": "1", "VLLMSNAPSHOT_INCARNATION": "here"}
        argv = [PYTHON, "-m", "vllmsnapshot_child.server", *files, "--", "--model", MODEL, *ARGS, *args]
        with (self.directory / "log").open("wb") as log:
            self.popen = subprocess.Popen(
                argv,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def tree(self) -> list[int]:
        assert self.popen is not None
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(name)) == self.popen.pid and alive(int(name)):
                    found.append(int(name))
        return found

    def file(self, name: str) -> dict[str, Any]:
        path = self.directory / name

        def there() -> bool:
            assert self.popen is not None
            assert path.exists() or self.popen.poll() is None, (self.directory / "log").read_text()[-4000:]
            return path.exists()

        until(there, name, START_S)
        value: dict[str, Any] = json.loads(path.read_text())
        return value

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            raw = reply.read()
        return json.loads(raw) if raw else None

    def close(self) -> None:
        if self.popen is not None:
            for pid in self.tree():
                os.kill(pid, signal.SIGKILL)
            self.popen.wait(30)


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Vllm]:
    it = Vllm(tmp_path)
    yield it
    it.close()


def inet_sockets(pid: int) -> list[str]:
    """The inet sockets that a process holds."""
    known = {
        line.split()[9]: table
        for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    }
    links = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()]
    return [known[n] for link in links if link.startswith("socket:[") and (n := link[8:-1]) in known]


def test_the_whole_life_of_a_real_engine(vllm: Vllm) -> None:
    vllm.start()
    ready = vllm.file("ready.json")
    assert len(ready["token_ids"]) == 1
    assert ready["bytes_freed"] > 64 << 20
    assert [m["prompt"] for m in ready["more"]] == [p.text for p in oracle.MORE]
    for pid in vllm.tree():
        assert inet_sockets(pid) == []
        assert not [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "io_uring" in os.readlink(fd)]

    with protocol.open_dir(str(vllm.directory)) as fd:
        marker = {"release": True, "host": "127.0.0.1", "port": vllm.port, "incarnation": "there"}
        protocol.write(fd, "release.json", marker)
    serving = vllm.file("serving.json")
    assert (serving["incarnation"], serving["oracle"]["text"]) == ("there", ready["text"])
    vllm.ask("/health")
    one = {"model": "m", "prompt": oracle.FIRST.text, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    choice = vllm.ask("/v1/completions", one)["choices"][0]
    assert choice["text"] == ready["text"]
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(ready["sampled_token_logprob"], abs=1e-3)
    seeded = {"model": "m", "prompt": "Once", "max_tokens": 8, "temperature": 1.0, "seed": 7}
    assert vllm.ask("/v1/completions", seeded)["choices"] == vllm.ask("/v1/completions", seeded)["choices"]

    assert vllm.popen is not None
    vllm.popen.send_signal(signal.SIGTERM)
    assert vllm.popen.wait(60) == 0
    assert vllm.tree() == []


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("--port", "9000"), "--port"),
        (("-tp", "2"), "--tensor-parallel-size"),
        (("--api-key", "hunter2"), "--api-key"),
        (("--api-key", "hunter2", "--no-such-flag"), "--no-such-flag"),
    ],
)
def test_what_cannot_work_is_refused_at_once(vllm: Vllm, args: tuple[str, ...], names: str) -> None:
    """By vLLM's own parser, whose names and abbreviations change (the list of flags itself: test_child_memory.py)."""
    vllm.start(*args)
    assert vllm.popen is not None
    assert vllm.popen.wait(120) == EXIT_CODES[Reason.BAD_ARGUMENTS]
    failed = vllm.file("failed.json")
    assert failed["reason"] == Reason.BAD_ARGUMENTS
    assert names in failed["message"]
    assert "hunter2" not in failed["message"]
    assert vllm.tree() == []
