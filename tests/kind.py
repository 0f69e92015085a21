"""The demo on kind, for machines with a Docker engine: the same images, chart and example.

Not run where this project is developed (there is no Docker engine there): see docs/limitations.md.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster import ClusterError, model
from tests.cluster.progress import Progress
from tests.system import MODELS, ROOT, install

# The names are those of deploy/examples and tests/e2e/values.yaml.
_BUILDS = [
    ("tests/images/vllm-cpu.Dockerfile", "vllmsnapshot.local/vllm-cpu:1", []),
    ("Dockerfile.child", "vllmsnapshot.local/child-cpu:dev", ["BASE=vllmsnapshot.local/vllm-cpu:1"]),
    ("Dockerfile.operator", "vllmsnapshot.local/operator:dev", []),
]


class Kind:
    """A kind cluster with the methods of `tests.cluster.Cluster` that the demo uses."""

    def __init__(self, name: str) -> None:
        self._name = f"vllmsnapshot-{name}"
        self.kubeconfig = ROOT / "build" / f"{self._name}.kubeconfig"

    def _run(self, *command: str, input: str | None = None, timeout: float = 1800.0) -> str:  # noqa: A002
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def up(self, weights: Path) -> None:
        """Create the cluster with the model mounted into its node."""
        for tool in ("docker", "kind", "kubectl", "helm"):
            if shutil.which(tool) is None:
                raise ClusterError(f"{tool} is not on PATH; CLUSTER=kind needs docker, kind, kubectl and helm")
        node: dict[str, Any] = {
            "role": "control-plane",
            "extraMounts": [{"hostPath": str(weights), "containerPath": f"{MODELS}/smollm2", "readOnly": True}],
        }
        config = {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [node]}
        self.kubeconfig.parent.mkdir(exist_ok=True)
        flags = ["--name", self._name, "--kubeconfig", str(self.kubeconfig), "--config", "-", "--wait", "120s"]
        self._run("kind", "create", "cluster", *flags, input=json.dumps(config))

    def down(self) -> None:
        """Delete the cluster."""
        self._run("kind", "delete", "cluster", "--name", self._name)
        self.kubeconfig.unlink(missing_ok=True)

    def load(self, reference: str) -> None:
        """Load an image of the local Docker engine."""
        self._run("kind", "load", "docker-image", reference, "--name", self._name)

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 120.0) -> str:  # noqa: A002
        """Run kubectl as administrator."""
        return self._run("kubectl", "--kubeconfig", str(self.kubeconfig), *arguments, input=input, timeout=timeout)

    def helm(self, *arguments: str, input: str | None = None, timeout: float = 600.0) -> str:  # noqa: A002
        """Run Helm as administrator."""
        return self._run("helm", "--kubeconfig", str(self.kubeconfig), *arguments, input=input, timeout=timeout)

    @contextlib.contextmanager
    def enter_network(self) -> Iterator[None]:
        """Route the pod network through the node's container while inside, so that pods can be asked directly."""
        inspect = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        address = self._run("docker", "inspect", "-f", inspect, f"{self._name}-control-plane").strip()
        subnet = self.kubectl("get", "nodes", "-o", "jsonpath={.items[0].spec.podCIDR}").strip()
        self._run("ip", "route", "replace", subnet, "via", address)
        try:
            yield
        finally:
            self._run("ip", "route", "delete", subnet)


def kind_cluster(name: str, progress: Progress) -> Kind:
    """A kind cluster with the system installed, as `tests.system.local_cluster` makes one without Docker."""
    for dockerfile, reference, arguments in _BUILDS:
        with progress.step(f"docker build {reference}"):
            build_args = [word for argument in arguments for word in ("--build-arg", argument)]
            subprocess.run(["docker", "build", "-q", "-f", dockerfile, "-t", reference, *build_args, "."], cwd=ROOT, check=True)
    cluster = Kind(name)
    with progress.step("kind create cluster"):
        cluster.up(model.smollm2(progress).resolve())
    try:
        for reference in ("vllmsnapshot.local/operator:dev", "vllmsnapshot.local/child-cpu:dev"):
            cluster.load(reference)
        install(cluster)
    except BaseException:
        cluster.down()
        raise
    return cluster
