"""What the barrier needs from an engine, and how an engine is chosen."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from vllmsnapshot_child.oracle import Prompt
from vllmsnapshot_child.protocol import Oracle, Reason

ENGINE = "VLLMSNAPSHOT_ENGINE"
"""Environment variable "module:factory" of another engine than vLLM (the tests have a small one)."""


class EngineError(Exception):
    """The engine gives up: `reason` is a `protocol.Reason` constant."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class Dropped(NamedTuple):
    """Bytes that `release_state` gave back."""

    weights: int = 0
    rest: int = 0
    """The KV cache, above all."""


class Reload(NamedTuple):
    """How `restore_state` brought the weights back."""

    seconds: float = 0.0
    """That reading them took; 0 if they were there."""
    problem: str = ""
    """Why they must not be dropped again; empty if they may be. They are as before in either case."""


class Engine(Protocol):
    """An inference engine that can stand at the barrier. The server calls in the order of the methods here."""

    weights_on_device: bool
    """A capture moves them into the memory of the process, where there must be room for them."""

    async def start(self) -> None:
        """Bring the engine up, ready to answer."""

    async def canary(self, prompt: Prompt) -> Oracle:
        """Answer greedily."""

    async def prebuild(self) -> None:
        """Build all of the HTTP front end that needs no port, and warm it up. The engine can answer at this time."""

    async def release_state(self, *, weights: bool) -> Dropped:
        """Drop what `restore_state` can bring back: the KV cache and, if wanted, the weights. The addresses stay."""

    async def restore_state(self) -> Reload:
        """Bring back what was dropped."""

    async def park(self) -> list[str]:
        """Replace the listening inet sockets of every process by inert descriptors; what they were."""

    async def trim(self) -> None:
        """Make every process as small as it can be before an image is made of it."""

    async def renew(self, env: Mapping[str, str]) -> None:
        """After the barrier: new environment variables and fresh entropy for every process."""

    async def serve(self, listener: socket.socket, host: str | None, port: int, serving: Callable[[], None]) -> None:
        """Serve on the bound socket until `stop`; an end that nobody asked for is an exception. Calls `serving` once connections are
        accepted.

        By then its handlers of SIGTERM and SIGINT, if it has any, are in place; the server puts others there.
        """

    def leave(self) -> None:
        """From now on every response ends its connection (`drain.py`)."""

    async def finish(self, limit_s: float) -> None:
        """Take no more connections and answer what there is, for at most `limit_s` seconds."""

    async def drop(self) -> None:
        """Drop all that is on the device, after `finish`. What still runs is aborted."""

    def stop(self) -> None:
        """Let `serve` return."""

    async def close(self) -> None:
        """End the engine. Called whatever happened; what does not end is killed after it."""


def load(args: list[str], *, barrier: bool) -> Engine:
    """The engine for these `vllm serve` arguments; without a barrier it is told to serve only. Raises EngineError(BadArguments)."""
    name = os.environ.get(ENGINE)
    if not name:
        from vllmsnapshot_child import vllm_engine

        return vllm_engine.create(args, barrier=barrier)
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise EngineError(Reason.BAD_ARGUMENTS, f"{ENGINE}={name!r}: {e}") from e
    engine: Engine = factory(args)
    return engine
