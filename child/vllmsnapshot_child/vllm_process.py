"""The part of the vLLM adapter that runs in every process of the engine.

Workers have it by `--worker-extension-cls` (`vllm_worker.py`), and `collective_rpc` reaches them. The engine's own process is the
worker too, with one rank and vLLM's in-process executor. Where it is another one (on CPU with
VLLM_ENABLE_V1_MULTIPROCESSING=1), no RPC for workers reaches it; but vLLM calls any method of its `EngineCore` that the API process names,
and loads plugins in each of its processes. So a plugin adds these methods to that class. A call runs in the loop that also
schedules requests, between two steps, and is answered: no thread, no signal, nothing to wait for by time.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from typing import Any

from vllmsnapshot_child import entropy, memory

PLUGIN = "vllmsnapshot"
"""Name of the entry point (`child/vllmsnapshot_child.dist-info`); a `VLLM_PLUGINS` of the user's must name it too."""

METHODS = ("vllmsnapshot_park", "vllmsnapshot_trim", "vllmsnapshot_renew")


class Process:
    """Methods that a process of the engine is asked for by name."""

    def vllmsnapshot_parent(self) -> int:
        """Whose child this process is."""
        return os.getppid()

    def vllmsnapshot_park(self) -> list[str]:
        """See `memory.park_listeners`."""
        return memory.park_listeners()

    def vllmsnapshot_trim(self) -> int:
        """Trim heap and scratch volume, let go of NVML; what is left of the process in bytes."""
        memory.trim_heap()
        memory.close_nvml()
        _remove_precompiled_headers()
        return memory.resident_anonymous()

    def vllmsnapshot_renew(self, env: dict[str, str], seeded: bool) -> None:
        """New environment and new entropy after the barrier. `seeded`: with the user's `--seed`."""
        os.environ.update(env)
        entropy.renew(keep_seeded=seeded)


class Core(Process):
    """The same for an engine process that is no worker: vLLM seeds nothing there."""

    def vllmsnapshot_renew(self, env: dict[str, str], seeded: bool) -> None:
        del seeded
        os.environ.update(env)
        entropy.renew()


def register() -> None:
    """vLLM's plugin: in the engine's process its class is loaded by now. Nothing is imported for it in the other ones."""
    core: Any = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        for name in METHODS:
            setattr(core.EngineCore, name, getattr(Core, name))


def _remove_precompiled_headers() -> None:
    """The C++ headers that TorchInductor compiled: 150 MB of the scratch volume, which travels with the image.

    Only an aid: the compiler takes the plain header beside it, should another kernel be needed one day.
    """
    directory = getattr(sys.modules.get("torch._inductor.codecache"), "_HEADER_DIR", None)
    if directory is not None:
        for path in glob.glob(os.path.join(directory, "*.gch")):
            with contextlib.suppress(OSError):
                os.unlink(path)
