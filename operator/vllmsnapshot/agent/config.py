"""Settings of the agent: one table of flags, environment variables, defaults and meanings."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any


def _option(default: Any, env: str, meaning: str) -> Any:
    return field(default=default, metadata={"env": env, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every field is a flag (`--kubelet-dir`) and an environment variable; the flag wins."""

    node_name: str = _option("", "NODE_NAME", "name of this node (required)")
    kubelet_dir: str = _option("/var/lib/kubelet", "VLLMSNAPSHOT_KUBELET_DIR", "the kubelet's directory")
    store_dir: str = _option("/var/lib/vllmsnapshot", "VLLMSNAPSHOT_STORE_DIR", "where artifacts are kept")
    store_quota: str = _option(
        "", "VLLMSNAPSHOT_STORE_QUOTA", "what all artifacts together may take, e.g. 500Gi; empty: what the disk has"
    )
    store_min_free: str = _option("1Gi", "VLLMSNAPSHOT_STORE_MIN_FREE", "what must stay free on the disk of the artifacts")
    criu_prefix: str = _option("/opt/criu", "VLLMSNAPSHOT_CRIU_PREFIX", "CRIU with the libraries it needs")
    cgroup_root: str = _option("/sys/fs/cgroup", "VLLMSNAPSHOT_CGROUP_ROOT", "the node's cgroup file system")
    accelerator: str = _option(
        "auto", "VLLMSNAPSHOT_ACCELERATOR", "auto (cuda where the driver loads and there is a GPU), cpu or cuda"
    )
    seccomp_profile: str = _option(
        "install",
        "VLLMSNAPSHOT_SECCOMP_PROFILE",
        "install: keep vllmsnapshot/no-io-uring.json in the kubelet's seccomp directory; none",
    )
    host: str = _option("", "VLLMSNAPSHOT_HEALTH_HOST", "address of the health endpoint; empty: all")
    port: int = _option(8081, "VLLMSNAPSHOT_HEALTH_PORT", "port of /healthz, /readyz and /metrics; 0: none")
    metrics: str = _option("on", "VLLMSNAPSHOT_METRICS", "on or off: whether /metrics is served")
    resync_seconds: float = _option(10.0, "VLLMSNAPSHOT_RESYNC_SECONDS", "every pod is looked at this often, whatever wakes it")
    doctor_seconds: float = _option(300.0, "VLLMSNAPSHOT_DOCTOR_SECONDS", "pause between two examinations of the node")
    kubeconfig: str = _option("", "VLLMSNAPSHOT_KUBECONFIG", "kubeconfig file; empty: the pod's service account")
    log_level: str = _option("INFO", "VLLMSNAPSHOT_LOG_LEVEL", "DEBUG, INFO, WARNING or ERROR")
    log_format: str = _option("text", "VLLMSNAPSHOT_LOG_FORMAT", "text, or json with one object per line")

    @property
    def quota_bytes(self) -> int | None:
        """Of the store; None: no quota."""
        return quantity(self.store_quota) if self.store_quota else None

    @property
    def min_free_bytes(self) -> int:
        """Of the store's disk."""
        return quantity(self.store_min_free)


_UNITS: Mapping[str, int] = {
    "": 1,
    **{p: 1000**n for n, p in enumerate("kMGTPE", 1)},
    **{f"{p}i": 1024**n for n, p in enumerate("KMGTPE", 1)},
}


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity (`500Gi`, `1.5T`, `1000`), rounded up. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([a-zA-Z]{0,2})", text, re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity of bytes, such as 500Gi")
    return math.ceil(Decimal(match[1]) * _UNITS[match[2]])


def parse(args: Sequence[str], env: Mapping[str, str]) -> Config:
    """The configuration. Exits with a message that names the setting if one is wrong."""
    parser = argparse.ArgumentParser(prog="vllmsnapshot-agent", description="Node agent of VLLMSnapshot.")
    for f in fields(Config):
        name = f.metadata["env"]
        kind = type(f.default)
        text = f"{f.metadata['meaning']} (${name}, default {f.default!r})"
        default: Any = env.get(name) or f.default
        # argparse converts and checks a default that is a string as it does a flag.
        parser.add_argument("--" + f.name.replace("_", "-"), dest=f.name, type=kind, default=default, help=text)
    found = vars(parser.parse_args(list(args)))
    config = Config(**{**found, "log_level": found["log_level"].upper()})
    if not config.node_name:
        parser.error("NODE_NAME or --node-name is required")
    if not 0 <= config.port <= 65535:
        parser.error(f"--port {config.port} is not a port")
    if not (0.1 <= config.resync_seconds <= 3600 and 1 <= config.doctor_seconds <= 86400):
        parser.error("--resync-seconds must be in 0.1..3600, --doctor-seconds in 1..86400")
    for flag, text in (("--store-quota", config.store_quota or "0"), ("--store-min-free", config.store_min_free)):
        try:
            quantity(text)
        except ValueError as e:
            parser.error(f"{flag}: {e}")
    if config.accelerator not in ("auto", "cpu", "cuda"):
        parser.error(f"--accelerator {config.accelerator} is neither auto, cpu nor cuda")
    if config.seccomp_profile not in ("install", "none"):
        parser.error(f"--seccomp-profile {config.seccomp_profile} is neither install nor none")
    if config.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        parser.error(f"--log-level {config.log_level} is not a level")
    if config.log_format not in ("text", "json"):
        parser.error(f"--log-format {config.log_format} is neither text nor json")
    if config.metrics not in ("on", "off"):
        parser.error(f"--metrics {config.metrics} is neither on nor off")
    return config


def from_process() -> Config:
    """From this process's arguments and environment."""
    import sys

    return parse(sys.argv[1:], os.environ)
