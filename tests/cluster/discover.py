"""Service discovery for Debian's Prometheus, which is built without Kubernetes': writes the replicas' addresses for `file_sd`.

Runs beside Prometheus in its pod (monitoring.yaml), with nothing but the standard library: `python3 discover.py FILE`.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PERIOD_S = 0.5


def targets(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As Kubernetes' own discovery with the relabelling of docs/autoscaling.md: the engine's port `http` of running pods."""
    found = []
    for pod in pods:
        address = pod["status"].get("podIP")
        if not address or pod["status"].get("phase") != "Running":
            continue
        for container in pod["spec"]["containers"]:
            for port in container.get("ports") or []:
                if (container["name"], port.get("name")) == ("engine", "http"):
                    labels = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
                    found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": labels})
    return found


def pods() -> list[dict[str, Any]]:
    """All replicas of the cluster."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    url = f"https://{host}:{port}/api/v1/pods?labelSelector=vllmsnapshot.io/role%3Dreplica"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"})
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, context=context, timeout=5) as reply:
        items: list[dict[str, Any]] = json.load(reply)["items"]
        return items


def main() -> None:
    """Keep the file current for ever; as long as the API server does not answer it stays as it is."""
    path = Path(sys.argv[1])
    before = None
    while True:
        try:
            now = json.dumps(targets(pods()), sort_keys=True)
        except (OSError, ValueError) as error:
            print(error, flush=True)
        else:
            if now != before:
                temporary = path.with_suffix(".tmp")
                temporary.write_text(now)
                temporary.replace(path)
                before = now
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
