"""What changes the artifact's key, what only rolls the pods, and what does neither."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vllmsnapshot.api.types import VLLMSnapshotSpec, Weights
from vllmsnapshot.controller import pods
from vllmsnapshot.objects import HASH_CHARS
from vllmsnapshot_child.weights import POLICIES

BASE: dict[str, Any] = {
    "model": "m",
    "image": "i",
    "args": ["--max-model-len", "2048"],
    "env": [{"name": "A", "value": "1"}],
    "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "8Gi"}},
    "podTemplate": {
        "metadata": {"labels": {"team": "x"}},
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    "env": [{"name": "B", "value": "2"}],
                },
                {"name": "sidecar", "image": "s"},
            ],
            "volumes": [{"name": "models", "hostPath": {"path": "/m"}}, {"name": "other", "emptyDir": {}}],
            "nodeSelector": {"gpu": "yes"},
        },
    },
}


def changed(path: str, value: Any) -> pods.Template:
    raw = copy.deepcopy(BASE)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = raw
    for part in parents:
        target = target.setdefault(part, {}) if isinstance(target, dict) else target[part]
    target[last] = value
    return pods.template(VLLMSnapshotSpec.model_validate(raw))


HERE = pods.template(VLLMSnapshotSpec.model_validate(BASE))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model", "other"),
        ("revision", "v2"),
        ("image", "other"),
        ("args", ["--max-model-len", "4096"]),
        ("args", ["2048", "--max-model-len"]),
        ("env.0.value", "2"),
        ("env", []),
        ("env.0", {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}),
        ("resources.limits.memory", "16Gi"),
        ("resources.limits", {"memory": "8Gi"}),
        ("podTemplate.spec.containers.0.env.0.value", "3"),
        ("podTemplate.spec.containers.0.volumeMounts.0.mountPath", "/elsewhere"),
        ("podTemplate.spec.containers.0.command", ["other"]),
        ("podTemplate.spec.volumes.0.hostPath.path", "/elsewhere"),
        ("podTemplate.spec.securityContext", {"runAsUser": 1000}),
        ("podTemplate.spec.runtimeClassName", "nvidia"),
        ("podTemplate.spec.securityContext.seccompProfile", {"type": "Localhost", "localhostProfile": "p"}),
        ("capture.weights", "Keep"),
        ("capture.weights", "Auto"),
    ],
)
def test_shapes_the_process(path: str, value: Any) -> None:
    there = changed(path, value)
    assert there.identity != HERE.identity, path
    assert there.revision != HERE.revision, "what shapes the process must roll the pods as well"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("serving.port", 9000),
        ("serving", {"hostNetwork": "Enabled", "portRange": {"start": 2000, "end": 2010}}),
        ("imagePullPolicy", "Always"),
        ("podTemplate.metadata.labels.team", "y"),
        ("podTemplate.metadata.annotations", {"a": "b"}),
        ("podTemplate.spec.nodeSelector.gpu", "no"),
        ("podTemplate.spec.containers.1.image", "t"),
        ("podTemplate.spec.volumes.1.emptyDir.medium", "Memory"),
        ("podTemplate.spec.containers.0.livenessProbe", {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 60}),
        ("podTemplate.spec.tolerations", [{"operator": "Exists"}]),
        ("podTemplate.spec.priorityClassName", "high"),
    ],
)
def test_rolls_the_pods_but_keeps_the_artifact(path: str, value: Any) -> None:
    there = changed(path, value)
    assert there.identity == HERE.identity, path
    assert there.revision != HERE.revision, path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicas", 7),
        ("capture.timeoutSeconds", 20),
        ("capture.policy", "Disabled"),
        ("restore.policy", "Require"),
        ("restore.failureBudget", 9),
        ("artifact.retain", 3),
        ("artifact.deletionPolicy", "Retain"),
        ("rollout.maxSurge", 4),
        ("serving.service", "Disabled"),
        ("resources.limits", {"memory": "8Gi", "nvidia.com/gpu": "1"}),
    ],
)
def test_changes_nothing_that_runs(path: str, value: Any) -> None:
    assert changed(path, value) == HERE, path


def test_artifacts_with_and_without_weights_are_never_confused() -> None:
    """Also what Auto made of it stays apart from both: another capture may decide otherwise."""
    assert len({changed("capture.weights", word).identity for word in Weights}) == len(Weights) == 3
    assert {word.value for word in Weights} == set(POLICIES), "the child's words"


def test_absent_and_empty_are_the_same() -> None:
    bare = {"model": "m", "image": "i"}
    assert pods.template(VLLMSnapshotSpec.model_validate(bare)).identity == (
        pods.template(VLLMSnapshotSpec.model_validate({**bare, "args": [], "env": [], "podTemplate": {}})).identity
    )


def test_hashes_fit_labels() -> None:
    assert len(HERE.identity) == len(HERE.revision) == HASH_CHARS
    assert HASH_CHARS <= 63
    assert int(HERE.identity, 16) >= 0


def test_the_revision_does_not_move_between_versions_of_the_operator() -> None:
    """If this fails, an upgrade rolls every replica of every user. (The identity may move, with FIXED_ENV: artifacts are retaken.)"""
    assert HERE.revision == "f2c1e6af483fc79745e9d6c839c565855cd423fe"
