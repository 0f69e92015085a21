"""Prometheus and prometheus-adapter on the local cluster: the metrics by which a HorizontalPodAutoscaler scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster import build, cache, images, oci
from tests.cluster.cluster import Cluster
from tests.cluster.progress import Progress

NAMESPACE: Final = "monitoring"
RULES: Final = images.ROOT / "deploy/examples/autoscale/prometheus-adapter.yaml"
"""The adapter's rules as users are told to set them; here they prove that they work."""

_MANIFESTS: Final = Path(__file__).with_name("monitoring.yaml")
_DISCOVER: Final = Path(__file__).with_name("discover.py")
_ADAPTER_IMAGE: Final = "vllmsnapshot.local/prometheus-adapter:0.12.0"


def prepare(progress: Progress) -> list[oci.Image]:
    """Build both images, as far as they are not in the cache."""
    return [*images.build_all(["prometheus"], progress), _adapter_image(progress)]


def install(cluster: Cluster, progress: Progress) -> None:
    """Install both and wait until the metrics API answers. Prometheus scrapes whatever replicas there are, every second."""
    for image in prepare(progress):
        cluster.load_image(image)
    with progress.step("installing Prometheus and its adapter"):
        rules = yaml.safe_dump({"rules": yaml.safe_load(RULES.read_text())["rules"]["custom"]})
        manifests = [
            *yaml.safe_load_all(_MANIFESTS.read_text()),
            _config_map("prometheus-adapter", "config.yaml", rules),
            _config_map("discover", _DISCOVER.name, _DISCOVER.read_text()),
        ]
        cluster.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))
        for name in ("prometheus", "prometheus-adapter"):
            cluster.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{name}", "--timeout=120s", timeout=150)
        wait = ("wait", "--for=condition=Available", "apiservice/v1beta1.custom.metrics.k8s.io", "--timeout=60s")
        cluster.kubectl(*wait)


def _config_map(name: str, file: str, text: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": NAMESPACE}, "data": {file: text}}


def _adapter_image(progress: Progress) -> oci.Image:
    program = build.binaries(build.ADAPTER, progress) / "adapter"

    def make(directory: Path) -> None:
        layer = directory / "layer.tar"
        oci.write_layer(layer, {"adapter": program})
        oci.write_image(directory, layer, {"Entrypoint": ["/adapter"], "User": "65532:65532"})

    layout = cache.publish("image-adapter", cache.digest(build.ADAPTER.key()), make)
    return oci.Image(_ADAPTER_IMAGE, layout, oci.only_manifest(layout))
