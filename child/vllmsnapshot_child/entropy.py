"""What processes of one image would draw alike, drawn anew. Standard library only; numpy and torch where they are loaded already.

An image holds the state of every generator that lives in user space. Two replicas that are restored from it would go on with the
same numbers: ids, keys and samples that no two fresh starts have in common. So every process of the tree calls `renew` between
the barrier and service.

What asks the kernel each time needs nothing: `secrets`, `os.urandom`, `uuid4`, arc4random of glibc. What cannot be reached stays
as it is in the image (docs/limitations.md): Python's hash seed, generators that somebody made for himself, authentication keys
of multiprocessing, libraries with an OpenSSL of their own.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from typing import Any

MULTICAST = 1 << 40
"""The bit by which RFC 9562 tells a random node of a time-based UUID from a network card's address."""


def renew(*, keep_seeded: bool = False) -> None:
    """New state for the generators of this process.

    `keep_seeded`: the user has seeded Python's, numpy's and torch's (vLLM's `--seed` seeds all three of them where the model is),
    so they are his: a fresh start would begin with the same numbers too.
    """
    if not keep_seeded:
        random.seed(os.urandom(32))
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(list(os.urandom(32)))
        if torch := sys.modules.get("torch"):
            torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)  # all devices
    _openssl()
    _file_names()
    _time_based_uuids()
    _block_hashes()


def _openssl() -> None:
    """Reseed the generator from which each thread's own is seeded; those notice. OpenSSL does so by itself after a fork only."""
    with contextlib.suppress(ImportError):
        import ssl

        ssl.RAND_add(os.urandom(32), 32.0)


def _file_names() -> None:
    """Names of temporary files and of multiprocessing's semaphores. They begin anew in another PID; a restored one is the same."""
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None
    synchronize: Any = sys.modules.get("multiprocessing.synchronize")
    if synchronize is not None:
        synchronize.SemLock._rand._rng_pid = None


def _time_based_uuids() -> None:
    """A node of this process's own, kept by Python: libuuid, which Python asks otherwise, keeps its node for the life of a process."""
    uuid: Any = sys.modules.get("uuid")
    if uuid is not None:
        uuid._generate_time_safe = None
        uuid._node = int.from_bytes(os.urandom(6), "big") | MULTICAST
        uuid._last_timestamp = None


def _block_hashes() -> None:
    """The secret under vLLM's hashes of KV cache blocks. It is one only where the hash can be made to collide
    (`--prefix-caching-hash-algo xxhash`). No block is cached at this time: prefixes are forgotten before the barrier.
    """
    module: Any = sys.modules.get("vllm.v1.core.kv_cache_utils")
    secret = getattr(module, "_NONE_HASH_SEED", None)
    if secret is None or secret in (module.DEFAULT_NONE_HASH_SEED, os.environ.get("PYTHONHASHSEED")):
        return
    for function in module._NON_CRYPTO_HASH_FUNCTIONS:
        with contextlib.suppress(ImportError):
            if function(secret) == module.NONE_HASH:
                module.init_none_hash(function)
                return
