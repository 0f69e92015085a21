"""The part of the vLLM adapter that runs where the model is: methods added to vLLM's worker (`--worker-extension-cls`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from vllmsnapshot_child import memory
from vllmsnapshot_child.vllm_process import Process

USER_EXTENSION = "VLLMSNAPSHOT_WORKER_EXTENSION"
"""Environment variable by which the user's own `--worker-extension-cls` reaches the worker, where both are put together."""

SMALLEST_DROPPED = 64 * 1024
"""Tensors below this size stay in the image. They are norms, biases and scales: a few of them come from no checkpoint (vLLM
sets them itself), so a reload would not bring them back, and together they weigh nothing."""


class SnapshotExtension(Process):
    """Methods for `collective_rpc`. vLLM refuses an extension whose names collide with the worker's: hence the prefix."""

    def vllmsnapshot_digests(self) -> dict[str, str]:
        """SHA-256 of every parameter."""
        worker: Any = self
        digests: dict[str, str] = worker.compute_weight_checksums()
        return digests

    def vllmsnapshot_drop(self, weights: bool) -> tuple[int, int]:
        """Stand-in for sleep level 2, which vLLM has on GPUs only: drop the KV cache and, if wanted, the weights.

        Returns the bytes of weights and KV cache (a plain tuple: it travels between processes).

        Only what is still a parameter can be dropped: where vLLM packs a weight for its CPU kernels, the packed copy belongs
        to the kernel and stays in the image (as does, with it, all that the kernel compiled).
        """
        worker: Any = self
        kv_cache = _drop(_flat(worker.model_runner.kv_caches))
        if not weights:
            return 0, kv_cache
        return _drop(p for p in worker.model_runner.get_model().parameters() if _is_dropped(p)), kv_cache

    def vllmsnapshot_reload(self) -> None:
        """Read from the checkpoint what `vllmsnapshot_drop` dropped, straight into the parameters that are there.

        vLLM's `reload_weights` loads every layer into new memory, processes it and copies it over: right for weights that are
        processed after loading, but five times slower. Where a parameter is as the checkpoint has it, this gives the same
        bits. Whether that holds for this model is established by digests in the rehearsal, never assumed.
        """
        import torch
        from vllm.model_executor.model_loader import get_model_loader

        worker: Any = self
        model = worker.model_runner.get_model()
        loader: Any = get_model_loader(worker.vllm_config.load_config)
        kept = [p for p in model.parameters() if not _is_dropped(p)]
        loaders = [(p, getattr(p, "weight_loader", None)) for p in kept]
        try:
            for parameter in kept:
                parameter.weight_loader = _load_nothing
            with torch.no_grad():
                model.load_weights(loader.get_all_weights(worker.model_config, model))
        finally:
            for parameter, original in loaders:
                if original is None:
                    del parameter.weight_loader
                else:
                    parameter.weight_loader = original

    def vllmsnapshot_weight_bytes(self) -> int:
        """Size of all parameters."""
        worker: Any = self
        storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in worker.model_runner.get_model().parameters())}
        return sum(storages.values())

    def vllmsnapshot_free_device_bytes(self) -> int:
        """Free memory of the accelerator."""
        import torch

        return int(torch.accelerator.get_memory_info()[0])


def _load_nothing(*_args: Any, **_kwargs: Any) -> bool:
    """Weight loader of a parameter that is still there. (The loaders of experts say whether they took the weight.)"""
    return True


def _is_dropped(parameter: Any) -> bool:
    return bool(parameter.untyped_storage().nbytes() >= SMALLEST_DROPPED)


def _drop(tensors: Iterable[Any]) -> int:
    freed, seen = 0, set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:  # tied weights share one storage
            seen.add(storage.data_ptr())
            freed += memory.drop_pages(storage.data_ptr(), storage.nbytes())
    return freed


def _flat(tensors: Any) -> Iterator[Any]:
    for item in tensors:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


def _compose() -> type:
    """Our extension, with the user's own beside it if he has one."""
    name = os.environ.get(USER_EXTENSION)
    if not name:
        return SnapshotExtension
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ImportError(f"{USER_EXTENSION}={name!r} is not the qualified name of a class")
    return type("Extension", (SnapshotExtension, getattr(importlib.import_module(module), attribute)), {})


Extension = _compose()
