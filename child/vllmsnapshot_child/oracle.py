"""What the engine is asked, to prove that it is the engine of the capture."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """A question with a greedy answer of exactly `tokens` tokens."""

    text: str
    tokens: int


FIRST = Prompt("The capital of France is", 1)
"""The canary of vLLM's own snapshot child, so that either side's ready file means the same."""

MORE = (
    Prompt("1, 2, 3, 4, 5, 6,", 4),
    Prompt("def add(a, b):\n    return", 4),
)
"""Several decode steps each, over other rows of the embedding and pages of the KV cache. Prompts with an answer that leaves no
doubt: a near tie would make the engine's own noise look like a damaged image."""
