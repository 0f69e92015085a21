"""Replicas of one artifact share nothing that replicas which were started one by one would not share."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.snapshot import Make, Snapshot, starts
from tests.system import System
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import Object

SECRET = "rotated"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
FILE = "/etc/rotated/key"


def secret(value: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": "default"},
        "stringData": {"key": value},
    }


async def whoami(snap: Snapshot, pod: Object) -> dict[str, Any]:
    """What the engine in this pod finds now."""
    port = int(pod["metadata"]["annotations"][c.ANNOTATION_PORT])
    asked = {"env": ["POD_NAME", "POD_IP", "KEY"], "files": [TOKEN, FILE]}
    reply = await snap.system.post(pod["status"]["podIP"], port, "/self", asked)
    assert reply is not None
    return reply


@pytest.fixture
def account(system: System) -> Iterator[str]:
    """A service account, whose token a replica gets if it asks for both by name; and a Secret."""
    name = "clones"
    system.apply(secret("first"))
    system.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": "default"}})
    yield name
    system.backend.kubectl("delete", f"secret/{SECRET}", f"serviceaccount/{name}")


async def test_each_replica_has_its_own_name_address_token_secrets_and_randomness(
    make: Make, system: System, account: str
) -> None:
    def field(name: str, path: str) -> Object:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    snap = await make(
        "clones",
        env=[
            {"name": "VLLMSNAPSHOT_ENGINE", "value": "small:create"},
            field("POD_NAME", "metadata.name"),
            field("POD_IP", "status.podIP"),
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "key"}}},
        ],
        podTemplate={
            "spec": {
                "serviceAccountName": account,
                "automountServiceAccountToken": True,
                "containers": [
                    {"name": c.CONTAINER, "volumeMounts": [{"name": "key", "mountPath": "/etc/rotated", "readOnly": True}]}
                ],
                "volumes": [{"name": "key", "secret": {"secretName": SECRET}}],
            }
        },
    )
    seed, _ = await snap.seeded()
    assert (await whoami(snap, seed))["env"]["KEY"] == "first"
    system.apply(secret("second"))
    snap.scale(3)
    pods = await snap.ready(3)
    assert starts(pods) == [c.START_COLD, c.START_RESTORE, c.START_RESTORE]
    found = [await whoami(snap, pod) for pod in pods]

    for pod, engine in zip(pods, found, strict=True):
        name, address = pod["metadata"]["name"], pod["status"]["podIP"]
        assert (engine["hostname"], engine["env"]["POD_NAME"], engine["env"]["POD_IP"]) == (name, name, address)
        claims = engine["files"][TOKEN].split(".")[1]
        claimed = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["kubernetes.io"]["pod"]
        assert claimed == {"name": name, "uid": pod["metadata"]["uid"]}
    for engine in found[1:]:
        assert (engine["env"]["KEY"], engine["files"][FILE]) == ("second", "second"), "as a pod that starts now finds it"
    numbers, keys = zip(*(process for engine in found for process in engine["drawn"]), strict=True)
    assert len(set(numbers)) == len(set(keys)) == 3 * 2
