"""What `helm test` finds: nothing on a good installation, and every kind of trouble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from vllmsnapshot.api import constants as c
from vllmsnapshot.controller.selftest import examine, told
from vllmsnapshot.kube import ApiError, Kube


class Answers:
    """An API server that serves these custom resources and has these pods."""

    def __init__(self, pods: Mapping[str, list[bool]], missing: tuple[str, ...] = ()) -> None:
        self.pods = pods
        self.missing = missing

    async def request(self, _method: str, path: str, **_: Any) -> dict[str, Any]:
        if path.rpartition("/")[2] in self.missing:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return {"items": []}

    async def list(self, _resource: object, namespace: str, *, labels: str) -> list[dict[str, Any]]:
        assert namespace == "system"
        component = dict(part.split("=") for part in labels.split(","))[c.LABEL_COMPONENT]
        return [
            {
                "metadata": {"name": f"{component}-{number}"},
                "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
            }
            for number, ready in enumerate(self.pods.get(component, []))
        ]


async def trouble(answers: Answers) -> dict[str, str]:
    found = await examine(cast(Kube, answers), "system")
    assert {"vllmsnapshots", "vllmsnapshotcontents", "vllmsnapshotnodes", "operator", "agent"} == found.keys()
    return {name: what for name, what in found.items() if what}


@pytest.mark.parametrize("agents", [[], [True, True]])
async def test_a_good_installation(agents: list[bool]) -> None:
    assert await trouble(Answers({"operator": [True], "agent": agents})) == {}


async def test_every_trouble_is_told() -> None:
    found = await trouble(Answers({"operator": [], "agent": [True, False, False]}, missing=("vllmsnapshotnodes",)))
    assert found == {
        "vllmsnapshotnodes": "cannot be listed: 404 NotFound: the server could not find the requested resource",
        "operator": "no pod is there",
        "agent": "not ready: agent-1, agent-2",
    }
    assert told(found).splitlines()[1] == "FAIL  operator: no pod is there"
    assert told({"agent": ""}) == "ok    agent\n"
