"""Alerts and dashboard ask only for what exists, and the runbook knows every alert."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.chart import CHART, ROOT, render
from tests.cluster import discover
from tools import dashboard
from vllmsnapshot import metrics as common
from vllmsnapshot.agent import metrics as agent
from vllmsnapshot.api import constants as c
from vllmsnapshot.controller import metrics as operator

RULES = CHART / "files" / "monitoring" / "rules.yaml"
FAMILIES = {family.name: family for family in (*common.COMMON, *operator.FAMILIES, *agent.FAMILIES)}
TARGET_LABELS = {"namespace", "pod", "instance", "job", "node"}
"""What a ServiceMonitor adds."""
ALL_ON: dict[str, Any] = {
    "monitoring": {kind: {"enabled": True} for kind in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")}
}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Where a query is, and the query."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def family_of(name: str) -> common.Family | None:
    """The family that a sample of this name belongs to."""
    found = FAMILIES.get(name)
    if found is not None:
        return None if found.kind == "histogram" else found
    found = FAMILIES.get(re.sub("_(bucket|sum|count)$", "", name))
    return found if found is not None and found.kind == "histogram" else None


def test_every_metric_that_is_asked_for_exists() -> None:
    for where, query in queries():
        names = re.findall(r"\b(?:vllmsnapshot_(?!io_)|vllm:|process_)\w+", query)
        assert names, where
        for name in names:
            base = re.sub("_(bucket|sum|count)$", "", name)
            known = family_of(name) is not None or base in dashboard.VLLM or name == "process_resident_memory_bytes"
            assert known, f"{where}: {name}"


LABEL = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"")


def selectors() -> Iterator[tuple[str, common.Family, str, str]]:
    """Every matcher: where, the family, label and value."""
    for where, query in queries():
        for name, matchers in re.findall(r"\b(vllmsnapshot_(?!io_)\w+)\{([^}]*)\}", query):
            family = family_of(name)
            assert family is not None
            for label, _, value in LABEL.findall(matchers):
                yield where, family, label, value


def test_every_label_that_is_asked_for_exists() -> None:
    found = list(selectors())
    assert len(found) > 20
    for where, family, label, _ in found:
        assert label in family.labels, f"{where}: {family.name} has no label {label}"


def values_of(label: str) -> set[str] | None:
    """The values that a label may have; None where they are not ours to know."""
    reasons = {value for name, value in vars(c.Reason).items() if name.isupper()}
    return {
        "condition": {c.READY, c.SNAPSHOT_READY, c.PROGRESSING, c.DEGRADED, c.STALE},
        "reason": reasons,
        "state": {*operator.STATES, "usable", "quarantined"},
        "start_mode": set(operator.MODES),
        "mode": {c.START_COLD, c.START_RESTORE, "refuse"},
        "result": {"success", "requeue", "wait", "error", "succeeded", "failed", "aborted"},
        "phase": {*agent.START_PHASES, *agent.CAPTURE_PHASES},
        "component": {"operator", "agent"},
    }.get(label)


def test_every_value_that_is_asked_for_can_be_there() -> None:
    for where, _, label, value in selectors():
        known = values_of(label)
        if known is not None and not value.startswith("$"):
            for one in value.split("|"):
                assert one in known, f"{where}: {label}={one}"


def test_sums_are_by_labels_that_exist() -> None:
    every = TARGET_LABELS | {"le", dashboard.MODE_LABEL} | {label for family in FAMILIES.values() for label in family.labels}
    for where, query in queries():
        for names in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", query):
            assert {name.strip() for name in names.split(",")} <= every, where


def test_the_labels_in_an_alerts_text_are_those_of_its_result() -> None:
    for rule in alerts():
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        (kept, *_) = re.findall(r"by \(([^)]*)\)", rule["expr"]) or [""]
        assert used <= {name.strip() for name in kept.split(",")}, rule["alert"]


# --- runbook ---------------------------------------------------------------------------------------------------------


def test_every_alert_has_a_section_in_the_runbook_and_every_section_an_alert() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(rule["alert"] for rule in alerts())


def test_alerts_say_what_and_where_to_read_on() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"RUNBOOK#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"].endswith(".") or rule["annotations"]["summary"].endswith(").")


def test_the_chart_puts_the_runbooks_address_into_the_rules() -> None:
    values = {"monitoring": {"prometheusRule": {"enabled": True, "runbookUrl": "https://docs.example/runbook/"}}}
    (rule,) = (o for o in render(values) if o["kind"] == "PrometheusRule")
    made = [one for group in rule["spec"]["groups"] for one in group["rules"]]
    assert [one["alert"] for one in made] == [one["alert"] for one in alerts()]
    assert [one["expr"] for one in made] == [one["expr"] for one in alerts()]
    for one in made:
        assert one["annotations"]["runbook_url"] == f"https://docs.example/runbook/#{one['alert'].lower()}"


# --- dashboard -------------------------------------------------------------------------------------------------------


def test_panels_do_not_overlap_and_are_described() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard.dashboard()["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= dashboard.WIDTH
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]


def test_every_family_is_shown_or_alerted_on() -> None:
    """A metric that nobody looks at is one that nobody will miss when it breaks."""
    asked = " ".join(query for _, query in queries())
    assert [name for name in FAMILIES if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", asked)] == []


def test_the_chart_carries_the_dashboard() -> None:
    (found,) = (o for o in render(ALL_ON) if o["kind"] == "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["vllmsnapshot.json"]) == dashboard.dashboard()


def test_the_monitors_select_what_there_is() -> None:
    objects = render(ALL_ON)
    services = {o["metadata"]["name"]: o for o in objects if o["kind"] == "Service"}
    workloads = {o["kind"]: o for o in objects if o["kind"] in ("Deployment", "DaemonSet")}
    pods = [w["spec"]["template"]["metadata"]["labels"].items() for w in workloads.values()]
    monitors = [o for o in objects if o["kind"] == "ServiceMonitor"]
    assert len(monitors) == len(services) == 2
    for monitor in monitors:
        (chosen,) = (
            s for s in services.values() if s["metadata"]["labels"].items() >= monitor["spec"]["selector"]["matchLabels"].items()
        )
        assert sum(labels >= chosen["spec"]["selector"].items() for labels in pods) == 1
        (endpoint,) = monitor["spec"]["endpoints"]
        assert [port["name"] for port in chosen["spec"]["ports"]] == [endpoint["port"]]
        assert endpoint["honorLabels"] is True
    (replicas,) = (o for o in objects if o["kind"] == "PodMonitor")
    assert replicas["spec"]["selector"]["matchLabels"] == {c.LABEL_ROLE: c.ROLE_REPLICA}
    assert replicas["spec"]["podTargetLabels"] == [c.LABEL_SNAPSHOT, c.LABEL_START_MODE]
    assert replicas["spec"]["podMetricsEndpoints"][0]["port"] == c.PORT_NAME
    spelled = {re.sub(r"[^a-zA-Z0-9_]", "_", label) for label in replicas["spec"]["podTargetLabels"]}
    assert spelled == {dashboard.SNAPSHOT_LABEL, dashboard.MODE_LABEL}


def test_the_local_clusters_discovery_finds_what_the_monitors_select() -> None:
    def pod(name: str, labels: dict[str, str], port: str, *, phase: str = "Running") -> dict[str, Any]:
        container = {"name": "x", "ports": [{"name": port, "containerPort": 8000}, {"name": "other", "containerPort": 1}]}
        return {
            "metadata": {"name": name, "namespace": "ns", "labels": labels},
            "spec": {"nodeName": "node-a", "containers": [container]},
            "status": {"podIP": "10.0.0.1", "phase": phase},
        }

    objects = render(ALL_ON)
    replica = {c.LABEL_ROLE: c.ROLE_REPLICA, c.LABEL_SNAPSHOT: "smol"}
    workloads = {
        o["spec"]["template"]["metadata"]["labels"][c.LABEL_COMPONENT]: o["spec"]["template"]
        for o in objects
        if o["kind"] in ("Deployment", "DaemonSet")
    }
    found = discover.targets(
        [
            pod("starting", replica, c.PORT_NAME),
            pod("restored", {**replica, c.LABEL_START_MODE: c.START_RESTORE}, c.PORT_NAME),
            pod("pending", replica, c.PORT_NAME, phase="Pending"),
            pod("stranger", {"app": "x"}, c.PORT_NAME),
            *(pod(name, template["metadata"]["labels"], "health") for name, template in workloads.items()),
        ]
    )
    mine = {"namespace": "ns", dashboard.SNAPSHOT_LABEL: "smol"}
    assert found["replicas.json"] == [
        {"targets": ["10.0.0.1:8000"], "labels": {**mine, "pod": "starting"}},
        {"targets": ["10.0.0.1:8000"], "labels": {**mine, "pod": "restored", dashboard.MODE_LABEL: c.START_RESTORE}},
    ]
    assert {item["labels"]["job"] for item in found["components.json"]} == {
        o["metadata"]["name"] for o in objects if o["kind"] == "Service"
    }
    assert [item["labels"].get("node") for item in found["components.json"] if item["labels"]["pod"] == "agent"] == ["node-a"]
    ports = {port["name"] for template in workloads.values() for item in template["spec"]["containers"] for port in item["ports"]}
    assert ports == {"health"}


def test_what_happens_now_and_then_is_drawn_once_an_interval() -> None:
    """A rate looks back over four scrapes: with a point per scrape one event would be drawn four times."""
    for panel in dashboard.dashboard()["panels"]:
        bars = panel["type"] == "timeseries" and panel["fieldConfig"]["defaults"]["custom"].get("drawStyle") == "bars"
        if bars or "increase(" in json.dumps(panel.get("targets", [])):
            assert panel["interval"] == dashboard.EVENTS, panel["title"]


def test_a_stat_shows_no_query_for_a_name() -> None:
    """Grafana calls a series without labels and legend by its query."""
    for panel in dashboard.dashboard()["panels"]:
        if panel["type"] == "stat":
            assert panel["options"]["textMode"] == "value", panel["title"]
