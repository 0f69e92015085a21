"""The environment of an engine: what makes it capturable, and what is another pod's after a restore.

What makes it capturable is put into the pod by the operator, where `kubectl describe` shows it and `spec.env` overrides it; the server
sets what is still missing, for images that are run by hand.

Nothing is here for NCCL's transports (P2P, SHM, cuMem, NVLS): with one rank vLLM creates no NCCL communicator, so there is
nothing for them to act on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PID_1 = "vllmsnapshot_child.init"
"""What stands in the command line of a PID 1 whose environment is the container's."""

DEFAULTS: Mapping[str, str] = {
    # On CPU, keeps the executor in the process of the engine: no worker process, and no shared-memory queues to it. (With one
    # GPU vLLM does so by itself. The API server is a process of its own in any case.)
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # fork would carry half-initialised threads, and on a GPU a half-initialised driver, into the engine.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # gloo and torch.distributed listen on loopback: an image bound to the pod's address restores in no other pod.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # /dev/infiniband cannot be dumped.
    "NCCL_IB_DISABLE": "1",
    # torch's NCCL process group exists even with one rank, and a thread of it aborts the process when another has not moved for
    # 8 minutes by the clock. A dump of many GiB to a slow disk stands still for longer, and the clock runs on.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Worker threads sleep while they wait for each other instead of spinning. With fewer free cores than threads (a CPU
    # limit, a neighbour, the API process beside them) spinning made every token 5-10 times slower (docs/child.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    # Unix sockets of the engine's queues: in the scratch volume that travels with the image.
    "VLLM_RPC_BASE_PATH": "/tmp",  # noqa: S108
    # A connection to the outside at the moment of the dump cannot be restored.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def of_this_container(started_with: Mapping[str, str], proc: str = "/proc") -> dict[str, str]:
    """What is otherwise in this container's environment than in the one that this process was `started_with`.

    A restored process has the environment of the pod it was captured in. PID 1 is never restored: the kubelet has given it this
    pod's own name and address, and the Secrets and ConfigMaps as they are now. What the process has changed for itself since its start
    stays, unless the two pods differ in it. Empty without our PID 1, and where its environment cannot be read.
    """
    try:
        with open(f"{proc}/1/cmdline", "rb") as f:
            if PID_1.encode() not in f.read().split(b"\0"):
                return {}
        with open(f"{proc}/1/environ", "rb") as f:
            items = [item.partition(b"=") for item in f.read().split(b"\0")]
    except OSError:
        return {}
    here = {os.fsdecode(name): os.fsdecode(value) for name, _, value in items if name}
    return {name: value for name, value in here.items() if started_with.get(name) != value}
