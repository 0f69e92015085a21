"""Asks a server the canary prompt over HTTP. Only for servers that write no serving.json (vLLM's own snapshot child)."""

from __future__ import annotations

import json
import math
from typing import Any

import aiohttp

from vllmsnapshot_child.protocol import Oracle

PROMPT = "The capital of France is"
"""The prompt of vLLM's own snapshot child, whose ready file holds the answer."""

TIMEOUT_S = 30.0
"""The first request with logprobs may compile a kernel."""
MAX_ANSWER_BYTES = 1 << 20


class Canary:
    """An HTTP client for the pods of this node. Trusts no answer: size, types and numbers are checked."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, address: str, port: int) -> Oracle | None:
        """The answer; None while there is none that makes sense. `token_ids` is empty where the server does not tell them."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), auto_decompress=False)
        base = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        try:
            models = await self._json("GET", f"{base}/v1/models")
            body = {
                "model": models["data"][0]["id"],
                "prompt": PROMPT,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 1,
                "return_token_ids": True,
            }
            choice = (await self._json("POST", f"{base}/v1/completions", body))["choices"][0]
            logprob = choice["logprobs"]["token_logprobs"][0]
            ids = choice.get("token_ids") or []
            if type(logprob) not in (int, float) or not math.isfinite(logprob) or not isinstance(choice["text"], str):
                return None
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
                return None
            return Oracle(token_ids=ids, text=choice["text"], sampled_token_logprob=float(logprob), prompt=PROMPT)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, IndexError, TypeError):
            return None

    async def _json(self, method: str, url: str, body: Any = None) -> Any:
        assert self._session is not None
        # Redirects would let a workload send the agent, which sits in the node's network, anywhere.
        async with self._session.request(method, url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"{url} answers {response.status}")
            raw = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                raw += chunk
                if len(raw) > MAX_ANSWER_BYTES:
                    raise ValueError(f"{url} answers too much")
            return json.loads(bytes(raw))
