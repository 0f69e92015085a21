"""vLLM behind the barrier: arguments, canary, release and reload, HTTP application.

Written against vLLM 0.32, whose own snapshot child (`vllm.snapshot.server`) makes the same engine calls. Everything that is
vLLM's is imported inside functions: importing it takes seconds and has side effects.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, NoReturn

from vllmsnapshot_child import drain, entropy, environment, memory, oracle
from vllmsnapshot_child.engine import Dropped, EngineError, Reload
from vllmsnapshot_child.oracle import Prompt
from vllmsnapshot_child.protocol import Oracle, Reason
from vllmsnapshot_child.vllm_process import PLUGIN
from vllmsnapshot_child.vllm_worker import USER_EXTENSION

WARM_UP_TIMEOUT_S = 60.0
"""For one request before the barrier."""

EXTENSION = "vllmsnapshot_child.vllm_worker.Extension"

REFUSED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    # flag: (why, whether the parsed value is acceptable)
    "host": ("the address comes from the release", lambda v: v is None),
    "port": ("the port comes from the release", lambda v: v == 8000),
    "uds": ("the server listens on a port", lambda v: v is None),
    "grpc": ("only the HTTP server can stand at the barrier", lambda v: not v),
    "grpc-port": ("only the HTTP server can stand at the barrier", lambda v: v is None),
    "headless": ("only the HTTP server can stand at the barrier", lambda v: not v),
    "api-server-count": ("one API server", lambda v: v in (None, 1)),
    "api-key": ("a secret would be stored in the image", lambda v: not v),
    "ssl-keyfile": ("a secret would be stored in the image", lambda v: v is None),
    "ssl-certfile": ("plain HTTP only", lambda v: v is None),
    "ssl-ca-certs": ("plain HTTP only", lambda v: v is None),
    "ssl-ciphers": ("plain HTTP only", lambda v: v is None),
    "enable-ssl-refresh": ("plain HTTP only", lambda v: not v),
    "middleware": ("foreign code in front of the canary", lambda v: not v),
    "tensor-parallel-size": ("one GPU per replica", lambda v: v == 1),
    "pipeline-parallel-size": ("one GPU per replica", lambda v: v == 1),
    "data-parallel-size": ("one engine per replica", lambda v: v == 1),
    "prefill-context-parallel-size": ("one GPU per replica", lambda v: v == 1),
    "nnodes": ("one engine per replica", lambda v: v == 1),
    "enable-expert-parallel": ("one GPU per replica", lambda v: not v),
    "enable-eplb": ("one GPU per replica", lambda v: not v),
    "enable-elastic-ep": ("one GPU per replica", lambda v: not v),
    "distributed-executor-backend": ("vLLM's own choice is right for one rank", lambda v: v in (None, "uni")),
    "device-ids": ("the device plugin chooses the GPU", lambda v: v is None),
    "kv-transfer-config": ("connections to others cannot be captured", lambda v: v is None),
    "kv-events-config": ("its listener is parked with all others", lambda v: v is None),
    "ec-transfer-config": ("connections to others cannot be captured", lambda v: v is None),
    "weight-transfer-config": ("connections to others cannot be captured", lambda v: v is None),
    "otlp-traces-endpoint": ("connections to others cannot be captured", lambda v: v is None),
    "kv-offloading-size": ("KV cache in the host's memory is not released", lambda v: not v),
    "cpu-offload-gb": ("weights in the host's memory are not released", lambda v: not v),
    "offload-group-size": ("weights in the host's memory are not released", lambda v: not v),
    "mm-tensor-ipc": ("memory shared between processes cannot be captured", lambda v: v in (None, "direct_rpc")),
    "enable-lora": ("adapters are not reloaded with the weights", lambda v: not v),
    "lora-modules": ("adapters are not reloaded with the weights", lambda v: not v),
    "speculative-config": ("a draft model is not reloaded with the weights", lambda v: v is None),
    "spec-method": ("a draft model is not reloaded with the weights", lambda v: v is None),
    "spec-model": ("a draft model is not reloaded with the weights", lambda v: v is None),
    "spec-tokens": ("a draft model is not reloaded with the weights", lambda v: v is None),
    "logprobs-mode": ("the canary needs log-probabilities", lambda v: str(v) not in ("raw_logits", "processed_logits")),
}
"""vLLM's own list (`vllm snapshot create`), and what cannot work in a pod whose address and port change."""


def check_arguments(args: argparse.Namespace) -> None:
    """Raise EngineError(BadArguments) that names the first flag that cannot work."""
    for flag, (why, acceptable) in REFUSED.items():
        value = getattr(args, flag.replace("-", "_"), None)
        if hasattr(args, flag.replace("-", "_")) and not acceptable(value):
            raise EngineError(Reason.BAD_ARGUMENTS, f"--{flag} is not supported: {why}")
    if os.environ.get("VLLM_API_KEY"):
        raise EngineError(Reason.BAD_ARGUMENTS, "VLLM_API_KEY is not supported: a secret would be stored in the image")


def create(argv: list[str], *, barrier: bool) -> VllmEngine:
    """Parse `vllm serve` arguments. Raises EngineError(BadArguments).

    Without a barrier nothing is changed about them: that replica is to be what plain vLLM would be, on any accelerator.
    """
    for name, value in environment.DEFAULTS.items():
        os.environ.setdefault(name, value)
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        # Not the whole command line: it may hold a secret, and this goes into a status.
        raise EngineError(Reason.BAD_ARGUMENTS, message)

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllmsnapshot_child.server"))
    parser.error = refuse
    # Whether the user chose the seed: he may have written the default, or an abbreviated flag.
    default_seed = parser.get_default("seed")
    parser.set_defaults(seed=None)
    args = parser.parse_args(argv)
    seeded = args.seed is not None
    if not seeded:
        args.seed = default_seed
    if args.model_tag is not None:
        args.model = args.model_tag
    check_arguments(args)
    args.api_server_count = None
    try:
        configure_logging_from_args(args)
        validate_parsed_serve_args(args)
    except (ValueError, TypeError) as e:
        raise EngineError(Reason.BAD_ARGUMENTS, str(e)) from e
    if not barrier:
        return VllmEngine(args, seeded=seeded)
    if args.worker_extension_cls:
        os.environ[USER_EXTENSION] = args.worker_extension_cls
    args.worker_extension_cls = EXTENSION
    if (chosen := os.environ.get("VLLM_PLUGINS")) is not None and PLUGIN not in chosen.split(","):
        os.environ["VLLM_PLUGINS"] = f"{chosen},{PLUGIN}"
    if current_platform.is_cpu():
        return CpuVllmEngine(args, seeded=seeded)
    args.enable_sleep_mode = True
    return VllmEngine(args, seeded=seeded)


class VllmEngine:
    """vLLM on an accelerator with sleep mode.

    Asleep at level 2, the engine has given weights and KV cache back; CUDA graphs, compiled kernels and buffers stay where they are,
    since their memory is in other pools (vLLM's `--sleep-mode-offload-cudagraph` is off). To keep the weights, only the KV cache is
    given back: level 1 would do that too, but copies the weights to pinned host memory and back, which then stays in the image.
    """

    weights_on_device = True

    def __init__(self, args: argparse.Namespace, *, seeded: bool) -> None:
        self.args = args
        self.seeded = seeded
        self._dropped = False  # the weights
        self._told = False  # to stop
        self.client: Any = None
        self.app: Any = None
        self._stack = AsyncExitStack()
        self._requests = 0
        self._tasks: tuple[str, ...] = ()
        self._traffic = drain.Traffic()

    async def start(self) -> None:
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.launcher import validate_api_server_args
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        # As vLLM's run_server does before its engine.
        if len(self.args.tool_parser_plugin or "") > 3:
            ToolParserManager.import_tool_parser(self.args.tool_parser_plugin)
        if len(self.args.reasoning_parser_plugin or "") > 3:
            ReasoningParserManager.import_reasoning_parser(self.args.reasoning_parser_plugin)
        try:
            validate_api_server_args(self.args)
        except KeyError as e:
            raise EngineError(Reason.BAD_ARGUMENTS, str(e)) from e
        self.client = await self._stack.enter_async_context(build_async_engine_client(self.args))
        self._tasks = await self.client.get_supported_tasks()
        if "generate" not in self._tasks:
            raise EngineError(Reason.BAD_ARGUMENTS, f"the model generates no text, so nothing can prove it: {self._tasks}")

    async def canary(self, prompt: Prompt) -> Oracle:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, min_tokens=prompt.tokens, max_tokens=prompt.tokens, seed=0, logprobs=0)
        self._requests += 1
        last: Any = None
        async for output in self.client.generate(prompt.text, sampling, request_id=f"vllmsnapshot-canary-{self._requests}"):
            last = output
        try:
            answer = last.outputs[0]
            ids = [int(i) for i in answer.token_ids]
            logprob = float(answer.logprobs[0][ids[0]].logprob)
        except (AttributeError, IndexError, KeyError, TypeError) as e:
            raise EngineError(Reason.CANARY_FAILED, f"no token or no log-probability for {prompt.text!r}") from e
        if len(ids) != prompt.tokens or not abs(logprob) < float("inf"):
            raise EngineError(Reason.CANARY_FAILED, f"{len(ids)} tokens, log-probability {logprob} for {prompt.text!r}")
        return Oracle(token_ids=ids, text=answer.text, sampled_token_logprob=logprob, prompt=prompt.text)

    async def prebuild(self) -> None:
        """vLLM's build_and_serve up to the point where it needs a socket, and one request of each common kind.

        The requests go through the application without a connection. They build the middleware stack, compile templates and
        schemas, and so on: the first request of a restored replica would pay for all that.
        """
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        self.app = build_app(self.args, self._tasks, self.client.model_config)
        await init_app_state(self.client, self.app.state, self.args, self._tasks)
        # Around the stack of middlewares, not into it: vLLM has built it by now.
        inner = self.app.middleware_stack or self.app.build_middleware_stack()
        self.app.middleware_stack = drain.TrafficMiddleware(inner, self._traffic)
        model = (self.args.served_model_name or [self.args.model])[0]
        common = {"model": model, "max_tokens": 1, "temperature": 0}
        await self._request("GET", "/health")
        await self._request("GET", "/v1/models")
        await self._request("GET", "/metrics")
        await self._request("POST", "/v1/completions", {**common, "prompt": oracle.FIRST.text})
        messages = [{"role": "user", "content": oracle.FIRST.text}]
        # Refused by a model without a chat template, which costs a replica nothing.
        await self._request("POST", "/v1/chat/completions", {**common, "messages": messages})
        await self._request("POST", "/v1/chat/completions", {**common, "messages": messages, "stream": True})

    async def release_state(self, *, weights: bool) -> Dropped:
        size: int = sum(await self._rpc("vllmsnapshot_weight_bytes"))
        free: int = sum(await self._rpc("vllmsnapshot_free_device_bytes"))
        self._dropped = weights
        if weights:
            await self.client.sleep(level=2)
        elif hasattr(self.client, "release_kv_cache_memory"):
            # Both reset the prefix cache, and no request is scheduled before the KV cache is back.
            await self.client.pause_generation(mode="abort", clear_cache=True)
            await self.client.release_kv_cache_memory()
        else:  # before vLLM 0.32
            await self.client.sleep(level=1)
            await self.client.wake_up(tags=["weights"])
        freed = max(0, sum(await self._rpc("vllmsnapshot_free_device_bytes")) - free)
        dropped = min(size, freed) if weights else 0
        return Dropped(weights=dropped, rest=freed - dropped)

    async def restore_state(self) -> Reload:
        began = time.monotonic()
        if self._dropped:
            await self.client.wake_up(tags=["weights"])
            await self._rpc("reload_weights")
        seconds = time.monotonic() - began if self._dropped else 0.0
        # Last, and the engine schedules again: before, a request would find weights that are zeros.
        await self.client.wake_up(tags=["kv_cache"])
        return Reload(seconds=seconds)

    async def park(self) -> list[str]:
        parked = memory.park_listeners()
        for more in await self._everywhere("vllmsnapshot_park"):
            parked += more
        return parked

    async def trim(self) -> None:
        memory.trim_heap()
        memory.close_nvml()
        engine = sum(await self._everywhere("vllmsnapshot_trim"))
        log(f"anonymous memory in the image: API {memory.resident_anonymous() >> 20} MiB, engine {engine >> 20} MiB")

    async def renew(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        entropy.renew()
        await self._everywhere("vllmsnapshot_renew", dict(env), self.seeded)

    async def serve(self, listener: socket.socket, host: str | None, port: int, serving: Callable[[], None]) -> None:
        from vllm import envs
        from vllm.entrypoints.launchers.launcher import serve_http
        from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
        from vllm.utils.system_utils import set_ulimit

        if self.app is None:
            await self.prebuild()
        args = self.args
        args.host, args.port = host, port
        set_ulimit()
        options: dict[str, Any] = {}
        if (log_config := get_uvicorn_log_config(args)) is not None:
            options["log_config"] = log_config
        running = asyncio.create_task(
            serve_http(
                self.app,
                sock=listener,
                enable_ssl_refresh=False,
                host=host,
                port=port,
                log_level=args.uvicorn_log_level,
                access_log=not args.disable_uvicorn_access_log,
                timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
                h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
                h11_max_header_count=args.h11_max_header_count,
                **options,
            )
        )
        # uvicorn says "started" once it listens; there is no event for it.
        while not running.done() and not getattr(getattr(self.app.state, "server", None), "started", False):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if not running.done():
            serving()
        shutdown = await running
        # As in vLLM: first the engine, then the rest of the HTTP server.
        await self.close()
        await shutdown
        if not self._told:
            # vLLM ends its HTTP server when the engine's process is gone. That is no good end, and no exit code 0.
            raise EngineError(Reason.ENGINE_FAILED, "the engine has ended by itself")

    def leave(self) -> None:
        self._traffic.last = True

    async def finish(self, limit_s: float) -> None:
        # Not uvicorn's own shutdown: that closes connections whose client was never told, at the end of their stream.
        server = self.app.state.server
        for listener in server.servers:
            listener.close()
        log(f"not listening any more: {self._traffic.running} requests run")
        if not await drain.answered(self._traffic, lambda: len(server.server_state.connections), limit_s):
            log(f"{self._traffic.running} requests are cut: they take longer than the grace time")

    async def drop(self) -> None:
        await self.client.sleep(level=2)

    def stop(self) -> None:
        server = self.app.state.server
        self._told = True
        # Forced: whoever is connected still has had his time.
        server.should_exit = server.force_exit = True

    async def close(self) -> None:
        await self._stack.aclose()

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        answer: list[Any] = await self.client.collective_rpc(method, args=args)
        return answer

    async def _everywhere(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `vllm_process.Process` in every process of the engine. Fails where one cannot be reached: it must not be cloned."""
        answers = await self._rpc(method, *args)
        # Workers that are not children of ours have the engine's own process between them and us.
        if set(await self._rpc("vllmsnapshot_parent")) != {os.getpid()}:
            answers.append(await self.client.engine_core.call_utility_async(method, *args))
        return answers

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> int:
        """One request straight into the ASGI application; its status."""
        raw = json.dumps(body).encode() if body is not None else b""
        status = 0
        inbox = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            # The application listens for a client that goes away; ours does not.
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": self.app.root_path or "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        began = time.monotonic()
        try:
            await asyncio.wait_for(self.app(scope, receive, send), timeout=WARM_UP_TIMEOUT_S)
        except Exception as e:  # a warm-up only: whatever a route dislikes, the user would see too
            log(f"warm-up {method} {path}: {type(e).__name__}: {e}")
        log(f"warm-up {method} {path}: status {status}, {time.monotonic() - began:.2f} s")
        return status


class CpuVllmEngine(VllmEngine):
    """vLLM on CPU, where sleep mode is refused: the worker extension drops and reloads (`vllm_worker.py`).

    Weights that the extension cannot reload bit by bit stay in the image: reading them from there takes no longer than vLLM's
    own `reload_weights`, and nothing can go wrong in between.
    """

    weights_on_device = False

    def __init__(self, args: argparse.Namespace, *, seeded: bool) -> None:
        super().__init__(args, seeded=seeded)
        self._before: list[dict[str, str]] | None = None  # digests, from the first drop to the proof that they come back
        self._proven = False

    async def drop(self) -> None:
        """Nothing is on a device."""

    async def release_state(self, *, weights: bool) -> Dropped:
        # A cached prefix would point at KV pages that are zeros now.
        await self.client.reset_prefix_cache()
        if weights and not self._proven:
            self._before = await self._rpc("vllmsnapshot_digests")
        self._dropped = weights
        freed = [Dropped(*f) for f in await self._rpc("vllmsnapshot_drop", weights)]
        return Dropped(weights=sum(f.weights for f in freed), rest=sum(f.rest for f in freed))

    async def restore_state(self) -> Reload:
        if not self._dropped:
            return Reload()
        began = time.monotonic()
        if self._proven:
            await self._rpc("vllmsnapshot_reload")
            return Reload(seconds=time.monotonic() - began)
        problem = "a reload gives other bits"
        try:
            await self._rpc("vllmsnapshot_reload")
            seconds = time.monotonic() - began
            if await self._rpc("vllmsnapshot_digests") == self._before:
                self._proven, self._before = True, None
                return Reload(seconds=seconds)
        except Exception as e:  # whatever it is, vLLM's own way is left
            problem = f"a reload fails: {type(e).__name__}: {e}"
        await self._rpc("reload_weights")
        return Reload(seconds=time.monotonic() - began, problem=problem[:500])


def log(message: str) -> None:
    """To vLLM's log."""
    from vllm.logger import init_logger

    init_logger("vllm.vllmsnapshot").info("%s", message)
