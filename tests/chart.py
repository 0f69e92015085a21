"""The chart for tests: rendering with real Helm, and the values that both the offline and the API server tests go through."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import build
from tests.cluster.progress import Progress

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "vllmsnapshot"
NAMESPACE = "vllmsnapshot-system"

Object = dict[str, Any]
Right = tuple[str, str, str]
"""API group, resource with subresource, verb."""

UNSEEN: dict[str, set[Right]] = {
    # Asked of the authorizer by admission (owner references with blockOwnerDeletion), never requested.
    "operator": {("vllmsnapshot.io", "vllmsnapshots/finalizers", "update")},
    # Server-side apply makes it: the request is a patch, the authorizer is asked for both.
    "agent": {("vllmsnapshot.io", "vllmsnapshotnodes", "create")},
}
"""Rights of a component that no call in its code and no request shows."""

MATRIX: dict[str, Object] = {
    "default": {},
    "local-cluster": yaml.safe_load((ROOT / "tests" / "e2e" / "values.yaml").read_text()),
    "digest": {"image": {"repository": "registry.example/a/b", "digest": "sha256:" + "0" * 64, "pullPolicy": "Always"}},
    "no-crds": {"crds": {"enabled": False}},
    "crds-removed-with-the-release": {"crds": {"keep": False}},
    "no-rbac": {"rbac": {"create": False}},
    "no-aggregation": {"rbac": {"aggregate": False}},
    "no-admission-policy": {"agent": {"admissionPolicy": {"enabled": False}}},
    "no-pod-admission-policy": {"podAdmissionPolicy": {"enabled": False}},
    "own-accounts": {
        "operator": {"serviceAccount": {"create": False, "name": "mine-operator"}},
        "agent": {"serviceAccount": {"create": True, "name": "mine-agent", "annotations": {"example.com/role": "agent"}}},
    },
    "no-metrics": {"metrics": {"enabled": False}},
    "monitoring": {
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "1m30s"},
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "5s"},
            "prometheusRule": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "runbookUrl": "https://docs.example/runbook/",
            },
            "dashboard": {"enabled": True, "labels": {"grafana": "yes"}, "annotations": {"grafana_folder": "Inference"}},
        }
    },
    "network-policy": {"networkPolicy": {"enabled": True}},
    "network-policy-with-peers": {
        "networkPolicy": {
            "enabled": True,
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "apiServerPorts": [6443],
        }
    },
    "never-evict": {"operator": {"podDisruptionBudget": {"enabled": True, "maxUnavailable": 0}}},
    "long-names": {"fullnameOverride": "a-name-that-is-as-long-as-the-schema-of-the-chart0", "nameOverride": "renamed"},
    "everything": {
        "commonLabels": {"example.com/team": "inference", "example.com/number": "1"},
        "imagePullSecrets": [{"name": "registry"}],
        "logging": {"format": "json"},
        "operator": {
            "logLevel": "DEBUG",
            "healthPort": 18080,
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "podLabels": {"example.com/pod": "yes"},
            "podAnnotations": {"example.com/note": "true"},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "priorityClassName": "",
        },
        "agent": {
            "logLevel": "WARNING",
            "healthPort": 18081,
            "kubeletDir": "/data/k0s/kubelet",
            "storeDir": "/mnt/nvme/vllmsnapshot",
            "runtimeClassName": "nvidia",
            "nodeSelector": {"nvidia.com/gpu.present": "true"},
            "tolerations": [],
            "affinity": {"nodeAffinity": {}},
            "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
            "podLabels": {"example.com/pod": "yes"},
            "podAnnotations": {"example.com/note": "true"},
            "extraEnv": [{"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
            "extraVolumes": [{"name": "driver", "hostPath": {"path": "/opt/nvidia", "type": "Directory"}}],
            "extraVolumeMounts": [{"name": "driver", "mountPath": "/usr/local/nvidia", "readOnly": True}],
            "priorityClassName": "",
            "resources": {"limits": {"memory": "2Gi", "cpu": 2}},
        },
    },
}
"""Values by name: each switch of the chart at least once away from its default."""


@functools.cache
def helm() -> str:
    """Helm: $HELM, the one on PATH, or the one that the local cluster's harness builds."""
    found = os.environ.get("HELM") or shutil.which("helm")
    return found or str(build.find("helm", Progress(quiet=True), (build.HELM,)))


def template(values: Object, *, release: str = "vllmsnapshot") -> subprocess.CompletedProcess[str]:
    """Run `helm template` with these values on top of the defaults."""
    command = [helm(), "template", release, str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)


def render(values: Object, *, release: str = "vllmsnapshot") -> list[Object]:
    """The objects that the chart makes of these values."""
    result = template(values, release=release)
    if result.returncode != 0:
        raise AssertionError(result.stderr)
    return [document for document in yaml.safe_load_all(result.stdout) if document]
