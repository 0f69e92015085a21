"""A process that uses PyTorch: a small network that learns, as a CUDA graph, and memory beside it.

Arguments: BYTES CONTROL [DEVICE]; DEVICE is cuda or, to try this file without a GPU, cpu. See loop.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # equal answers of equal work, which cuBLAS promises only so

import torch

from tests.gpu.loop import attend
from vllmsnapshot_child.memory import close_nvml

WIDTH = 512


def digest(tensors: list[torch.Tensor]) -> str:
    """Of the bytes, copied to the host. Without numpy, which need not be installed."""
    total = hashlib.sha256()
    for tensor in tensors:
        here = tensor.detach().contiguous().cpu()
        total.update(ctypes.string_at(here.data_ptr(), here.numel() * here.element_size()))
    return total.hexdigest()


def main() -> None:
    """Set up, then take a step in every round."""
    size, control = int(sys.argv[1]), sys.argv[2]
    device = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cuda")
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    weights = torch.randn(WIDTH, WIDTH, device=device)
    state = torch.randn(WIDTH, WIDTH, device=device)
    ballast = torch.randint(-(1 << 62), 1 << 62, (max(1, size // 8),), device=device)

    def work() -> None:
        state.copy_(torch.tanh(state @ weights) + state)

    graph = None
    if device.type == "cuda":
        # As vLLM does it: warmed up on a stream of its own, then recorded once and replayed.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

    def step(number: int) -> dict[str, object]:
        before = digest([weights, state, ballast])
        expected = torch.tanh(state @ weights) + state
        if graph is not None:
            graph.replay()
        else:
            work()
        correct = bool(torch.allclose(state, expected, rtol=1e-4, atol=1e-4))
        # The random generator lives on the GPU, too.
        state.add_(torch.randn(WIDTH, WIDTH, device=device))
        return {"before": before, "correct": correct, "after": digest([weights, state, ballast])}

    facts = {"bytes": 8 * ballast.numel(), "torch": torch.__version__, "cuda": torch.version.cuda, "graph": graph is not None}
    attend(control, {**facts, "nvmlClosed": close_nvml()}, step)


if __name__ == "__main__":
    main()
