"""Service discovery for Debian's Prometheus, which is built without Kubernetes': writes addresses for `file_sd`.

Runs beside Prometheus in its pod (monitoring.yaml), with nothing but the standard library: `python3 discover.py DIRECTORY`.
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


REPLICAS, COMPONENTS = "replicas.json", "components.json"
Pod = dict[str, Any]


def targets(pods: list[Pod]) -> dict[str, list[dict[str, Any]]]:
    """By file, what the monitors of the chart select, with the labels that they give: the engines of replicas (its PodMonitor;
    docs/autoscaling.md has the same without the Prometheus operator), and operator and agents (its ServiceMonitors)."""
    found: dict[str, list[dict[str, Any]]] = {REPLICAS: [], COMPONENTS: []}
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if labels.get("vllmsnapshot.io/role") == "replica":
            more = {
                f"vllmsnapshot_io_{name.replace('-', '_')}": value
                for name in ("snapshot", "start-mode")
                if (value := labels.get(f"vllmsnapshot.io/{name}"))
            }
            found[REPLICAS] += _scraped(pod, "http", more)
        elif labels.get("app.kubernetes.io/name") == "vllmsnapshot":
            component = labels.get("app.kubernetes.io/component", "")
            more = {"job": f"vllmsnapshot-{component}-metrics"}
            if component == "agent":
                more["node"] = pod["spec"].get("nodeName", "")
            found[COMPONENTS] += _scraped(pod, "health", more)
    return found


def _scraped(pod: Pod, port: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    address = pod["status"].get("podIP")
    if not address or pod["status"].get("phase") != "Running":
        return []
    own = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
    return [
        {"targets": [f"{address}:{item['containerPort']}"], "labels": {**own, **labels}}
        for container in pod["spec"]["containers"]
        for item in container.get("ports") or []
        if item.get("name") == port
    ]


def pods() -> list[Pod]:
    """All pods of the cluster."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    request = urllib.request.Request(
        f"https://{host}:{port}/api/v1/pods", headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, context=context, timeout=5) as reply:
        items: list[Pod] = json.load(reply)["items"]
        return items


def main() -> None:
    """Keep the files current for ever; as long as the API server does not answer they stay as they are."""
    directory = Path(sys.argv[1])
    before: dict[str, str] = {}
    while True:
        try:
            now = {name: json.dumps(found, sort_keys=True) for name, found in targets(pods()).items()}
        except (OSError, ValueError) as error:
            print(error, flush=True)
        else:
            for name, text in now.items():
                if text != before.get(name):
                    path = directory / name
                    temporary = path.with_suffix(".tmp")
                    temporary.write_text(text)
                    temporary.replace(path)
            before = now
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
