"""The doctor's checks of GPUs, pure: what was seen (`gpu_facts.Survey`) becomes findings that name the setting.

They concern replicas with a GPU only. A node whose driver is broken captures and restores replicas on CPU as ever, so a failure
here does not make the node incapable: it is told apart by the name of the check (`doctor.GPU`).

Persistence mode is not looked at: a restore needs it, or a process that has called cuInit, and the agent's helper is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .doctor import GPU, Finding, failed, passed, warned
from .driver import DRIVER_MINIMUM, LIBCUDA, VGPU
from .gpu_facts import Survey, too_old

NO_PROCESS_BYTES: Final = 2 << 30
"""Memory in use on a GPU that no process uses, from which on it is odd. The driver itself reserves up to about 1 GiB."""

PROHIBITED: Final = 2
"""NVML_COMPUTEMODE_PROHIBITED; 0 is the default, 1 and 3 let one thread or process in."""

_REACH: Final = (
    "give the agent the driver's libraries (agent.runtimeClassName: nvidia, and in agent.extraEnv NVIDIA_VISIBLE_DEVICES=all, "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility); without them replicas with a GPU start cold"
)


def checks(seen: Survey) -> Sequence[tuple[str, Callable[[], Finding]]]:
    """The checks that apply, with their names."""
    found: list[tuple[str, Callable[[], Finding]]] = [(f"{GPU}driver", lambda: driver(seen))]
    if seen.facts is not None and seen.facts["devices"]:
        devices = seen.facts["devices"]
        found += [(f"{GPU}mode", lambda: mode(devices)), (f"{GPU}memory", lambda: memory(devices))]
    return found


def present(seen: Survey) -> bool:
    """Whether there is a GPU, or should be: then it is worth a word whether it can be used."""
    return seen.wanted != "cpu" and (seen.files or bool(seen.module) or seen.facts is not None or seen.wanted == "cuda")


def driver(seen: Survey) -> Finding:
    """Whether the driver can be used from the agent's container, and is new enough."""
    if not present(seen):
        return passed("no GPU" if seen.wanted != "cpu" else "not used (VLLMSNAPSHOT_ACCELERATOR is cpu)")
    if seen.facts is None or seen.error:
        return _unreachable(seen)
    text = f"NVIDIA driver {seen.facts['driver']}, CUDA API {seen.facts['api']}"
    if too_old(seen.facts):
        return failed(f"{text}: too old", f"install driver {DRIVER_MINIMUM} (CUDA 13.0) or newer on the node")
    return passed(text)


def _unreachable(seen: Survey) -> Finding:
    version = f"version {seen.module}" if seen.module else "not loaded in the kernel"
    if not seen.files:
        if seen.module:
            return failed(
                f"NVIDIA driver {version}, but no /dev/nvidia0 in the agent's container",
                "delete the agent's pod on this node: a driver that is installed after its start does not reach it",
            )
        return failed(
            "no GPU, though VLLMSNAPSHOT_ACCELERATOR is cuda" + (f": {seen.error}" if seen.error else ""),
            "install the NVIDIA driver on the node, or set VLLMSNAPSHOT_ACCELERATOR to auto",
        )
    if "cannot open shared object file" in seen.error:
        return failed(f"there are GPUs (NVIDIA driver {version}), but not the driver's libraries: {seen.error}", _REACH)
    return failed(
        f"NVIDIA driver {version}: {seen.error}",
        f"run nvidia-smi on the node, look for Xid in dmesg; {LIBCUDA} names another library",
    )


def mode(devices: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether the GPUs are whole ones that several processes may use. Bad ones among good ones are a warning."""
    bad: dict[str, list[str]] = {}
    odd = []
    for device in devices:
        if device["mig"]:
            bad.setdefault("turn MIG off (nvidia.com/mig.config: all-disabled)", []).append(f"GPU {device['uuid']}: MIG is on")
        elif device["virtual"] >= VGPU:
            bad.setdefault("pass the whole GPU through to the machine", []).append(f"GPU {device['uuid']}: a vGPU")
        elif device["compute"] == PROHIBITED:
            what = f"GPU {device['uuid']}: compute mode Prohibited"
            bad.setdefault("set the compute mode to Default (nvidia-smi -c DEFAULT)", []).append(what)
        elif device["compute"]:
            odd.append(f"GPU {device['uuid']}: compute mode Exclusive: who comes while a replica is checkpointed keeps it")
    text = "; ".join(x for found in bad.values() for x in found)
    if bad and sum(map(len, bad.values())) == len(devices):
        return failed(text, "; ".join(bad))
    if bad:
        return warned(f"{text}; replicas on these start cold", "; ".join(bad))
    if odd:
        return warned("; ".join(odd), "set the compute mode to Default (nvidia-smi -c DEFAULT)")
    return passed(", ".join(sorted({d["name"] for d in devices})) + f" ({len(devices)})")


def memory(devices: Sequence[Mapping[str, Any]]) -> Finding:
    """Memory that somebody holds who is not there any more. Only a warning: a restore looks at its own GPU anyway."""
    odd = [
        f"GPU {d['uuid']}: {(d['total'] - d['free']) / (1 << 30):.1f} GiB are in use, by no process"
        for d in devices
        if d["processes"] == 0 and d["total"] - d["free"] > NO_PROCESS_BYTES
    ]
    if odd:
        return warned(
            "; ".join(odd), "look for Xid in dmesg; once nothing runs there, nvidia-smi --gpu-reset or a restart of the node"
        )
    return passed("all that is in use is some process's")
