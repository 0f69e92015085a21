"""What is proved: a process of the driver alone, PyTorch, and vLLM in this project's own child."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.gpu.proof import Answer, Engine, ProofError, SkippedError
from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import Ready, Release, Serving

HERE: Final = Path(__file__).resolve().parent
CONTROL: Final = "/run/vllmsnapshot"

VLLM_MEMORY: Final = 4 << 30
"""Bytes of the GPU that vLLM may use, on a GPU that has as much."""

VLLM_ENVIRONMENT: Final = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "XDG_CONFIG_HOME": "/tmp/.config",
    "VLLM_CACHE_ROOT": "/tmp/.cache/vllm",
    "VLLM_CONFIG_ROOT": "/tmp/.config/vllm",
    "TRITON_CACHE_DIR": "/tmp/.cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/.cache/inductor",
    "HF_HUB_OFFLINE": "1",
}
"""As the operator sets it: what the process maps of its caches has to travel."""


def installed(package: str) -> Path | None:
    """Where a package is, without importing it."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


class Talking:
    """A process that answers over loop.py."""

    name = ""
    loopback = False

    def up(self, engine: Engine) -> Answer:
        """It says so."""
        return engine.message("up")

    def before(self, engine: Engine) -> Answer:
        """A round."""
        return self.after(engine)

    def after(self, engine: Engine) -> Answer:
        """The next one."""
        answer = engine.ask()
        if not answer["correct"]:
            raise ProofError(f"the GPU computed something else than was expected: {dict(answer)}")
        return answer

    def follows(self, before: Answer, after: Answer) -> str:
        """Nothing may have changed between the rounds."""
        return "" if after["before"] == before["after"] else f"memory is {after['before']} instead of {before['after']}"


class Driver(Talking):
    """Nothing but the driver's API."""

    name = "driver"

    def __init__(self, size: int) -> None:
        self.size = size

    def command(self) -> list[str]:
        """See app_driver.py."""
        return [sys.executable, "-m", "tests.gpu.app_driver", "memory", str(self.size), CONTROL]


class Torch(Talking):
    """PyTorch."""

    name = "torch"

    def __init__(self, size: int) -> None:
        self.size = size
        if installed("torch") is None:
            raise SkippedError(f"PyTorch is not installed for {sys.executable}")

    def command(self) -> list[str]:
        """See app_torch.py."""
        return [sys.executable, "-m", "tests.gpu.app_torch", str(self.size), CONTROL]


class Vllm:
    """vLLM behind the barrier of this project's child, with a tiny model unless one is named."""

    name = "vllm"
    loopback = True

    def __init__(self, directory: Path, model: Path | None, total: int, *, eager: bool) -> None:
        """`total`: bytes of the GPU's memory."""
        if installed("vllm") is None:
            raise SkippedError(f"vLLM is not installed for {sys.executable}")
        self.model = model or directory / "model"
        self.share = min(0.9, max(0.02, VLLM_MEMORY / total))
        self.eager = eager
        if model is None:
            make = [sys.executable, str(HERE / "tiny_model.py"), str(self.model)]
            done = subprocess.run(make, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            if done.returncode:
                raise ProofError(f"no model could be made: {done.stderr[-1000:]}")

    def command(self) -> list[str]:
        """This project's server, as its container starts it."""
        files = ["--ready-file", f"{CONTROL}/ready.json", "--release-file", f"{CONTROL}/release.json"]
        limits = ["--max-model-len", "256", "--max-num-seqs", "4", "--gpu-memory-utilization", f"{self.share:.3f}"]
        server = [sys.executable, "-m", "vllmsnapshot_child.server", *files, "--", "--model", str(self.model), *limits]
        environment = [f"{k}={v}" for k, v in VLLM_ENVIRONMENT.items()]
        return ["/usr/bin/env", *environment, *server, *(["--enforce-eager"] if self.eager else [])]

    def up(self, engine: Engine) -> Answer:
        """At the barrier."""
        ready = Ready.from_dict(engine.file("ready.json"))
        return {"phases": ready.phases, "bytesFreed": ready.bytes_freed}

    def before(self, engine: Engine) -> Answer:
        """The answer that every later one must equal."""
        oracle = Ready.from_dict(engine.file("ready.json")).oracle
        return {"oracle": oracle.to_dict()}

    def after(self, engine: Engine) -> Answer:
        """The answer after the release."""
        with protocol.open_dir(str(engine.bare.control)) as fd:
            protocol.write(fd, Release.FILE, Release(incarnation="", host=None, port=8000).to_dict())
        serving = Serving.from_dict(engine.file("serving.json"))
        # The probability may differ in its last digits, and the child has already compared it.
        return {key: serving.oracle[key] for key in ("token_ids", "text")}

    def follows(self, before: Answer, after: Answer) -> str:
        """The same words."""
        recorded: Mapping[str, Any] = before["oracle"]
        same = recorded["token_ids"] == after["token_ids"] and recorded["text"] == after["text"]
        return "" if same else f"{dict(after)} instead of {dict(recorded)}"
