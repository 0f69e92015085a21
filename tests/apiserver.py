"""A test cluster's API server, through the project's own client."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import yaml

from tests.cluster import Cluster
from vllmsnapshot.kube import CONTENTS, NODES, PODS, SNAPSHOT_NODES, SNAPSHOTS, Kube, Resource

Object = dict[str, Any]
T = TypeVar("T")

HPAS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
KINDS = {r.kind: r for r in (PODS, NODES, SNAPSHOTS, CONTENTS, SNAPSHOT_NODES, HPAS, CLAIMS)}


class Api:
    """The API server of a cluster, for synchronous tests; as administrator, or as whom a bearer token stands for."""

    def __init__(self, cluster: Cluster, token: str | None = None) -> None:
        self.cluster = cluster
        self.token = token

    def call(self, what: Callable[[Kube], Awaitable[T]]) -> T:
        """Run one piece of work with a client."""

        async def run() -> T:
            async with await Kube.connect(path) as kube:
                return await what(kube)

        with tempfile.NamedTemporaryFile("w", suffix=".kubeconfig") as file:
            path = str(self.cluster.kubeconfig)
            if self.token is not None:
                config = yaml.safe_load(self.cluster.kubeconfig.read_text())
                config["users"][0]["user"] = {"token": self.token}
                yaml.safe_dump(config, file)
                file.flush()
                path = file.name
            with self.cluster.enter_network():
                return asyncio.run(run())

    def create(self, obj: Object, *, dry_run: bool = False, validation: str = "Strict") -> Object:
        """Create an object of one of KINDS, refusing unknown fields as kubectl does."""
        resource = KINDS[obj["kind"]]
        namespace = obj["metadata"].get("namespace", "default") if resource.namespaced else None
        query = {"fieldValidation": validation, "dryRun": "All" if dry_run else None}
        return self.call(lambda kube: kube.request("POST", resource.path(namespace), query=query, body=obj))

    def update(self, obj: Object, *, subresource: str | None = None, dry_run: bool = False) -> Object:
        """Replace an object or its subresource."""
        resource = KINDS[obj["kind"]]
        meta = obj["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"], subresource)
        query = {"fieldValidation": "Strict", "dryRun": "All" if dry_run else None}
        return self.call(lambda kube: kube.request("PUT", path, query=query, body=obj))

    def delete(self, obj: Object) -> None:
        """Delete an object, if it is there."""
        meta = obj["metadata"]
        resource = KINDS[obj["kind"]]
        namespace = meta.get("namespace", "default") if resource.namespaced else None
        self.call(lambda kube: kube.delete(resource, meta["name"], namespace))
