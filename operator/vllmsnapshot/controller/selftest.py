"""What `helm test` runs in a pod: whether this installation works, as the API server tells it.

Exit status 0 if the custom resources are served and the operator and all agents are ready, else 1 with a line for each that is not.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from ..api import constants as c
from ..kube import CONTENTS, PODS, SNAPSHOT_NODES, SNAPSHOTS, ApiError, Kube
from ..objects import is_true


async def examine(kube: Kube, namespace: str) -> dict[str, str]:
    """What was looked at, and what is wrong with it (empty: nothing)."""
    found: dict[str, str] = {}
    for resource in (SNAPSHOTS, CONTENTS, SNAPSHOT_NODES):
        try:
            await kube.request("GET", resource.path(), query={"limit": 1})
            found[resource.plural] = ""
        except ApiError as e:
            found[resource.plural] = f"cannot be listed: {e}"
    for component in (c.COMPONENT_OPERATOR, c.COMPONENT_AGENT):
        labels = f"{c.LABEL_COMPONENT}={component},app.kubernetes.io/part-of={c.MANAGED_BY}"
        try:
            pods = await kube.list(PODS, namespace, labels=labels)
        except ApiError as e:
            found[component] = f"its pods cannot be listed: {e}"
            continue
        waiting = [str(pod["metadata"]["name"]) for pod in pods if not is_true(pod, "Ready")]
        if waiting:
            found[component] = f"not ready: {', '.join(sorted(waiting))}"
        else:
            # No agent at all is a choice (agent.nodeSelector): replicas start cold then.
            found[component] = "" if pods or component == c.COMPONENT_AGENT else "no pod is there"
    return found


def told(found: Mapping[str, str]) -> str:
    """A line for each finding."""
    return "".join(
        f"{'FAIL' if trouble else 'ok':4}  {name}{': ' + trouble if trouble else ''}\n" for name, trouble in found.items()
    )


async def run() -> int:
    """Examine and tell."""
    async with await Kube.connect() as kube:
        found = await examine(kube, os.environ.get("POD_NAMESPACE", "vllmsnapshot-system"))
    sys.stdout.write(told(found))
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
