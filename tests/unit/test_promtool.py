"""What Prometheus itself makes of alerts and dashboard: every alert fires when it should, and none when all is well."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.progress import Progress
from tests.cluster.promtool import promtool as fetched
from tests.unit.test_monitoring import RULES, alerts
from tools import dashboard
from vllmsnapshot.agent import metrics as agent
from vllmsnapshot.api import constants as c

SNAP = 'namespace="ns",snapshot="smol"'
AGENT = 'namespace="system",pod="agent-1"'
OPERATOR = 'namespace="system",pod="operator-1"'
Series = dict[str, str]


def condition(kind: str, reason: str, value: str) -> Series:
    return {f'vllmsnapshot_snapshot_condition{{{SNAP},condition="{kind}",reason="{reason}"}}': value}


def starts(mode: str, seconds: int) -> Series:
    """A start a minute that took more than half of and at most so many seconds."""
    bounds = [f"{bound:.1f}" for bound in agent.START_BUCKETS.bounds]
    return {
        f'vllmsnapshot_start_seconds_bucket{{mode="{mode}",le="{bound}"}}': "0+1x600" if float(bound) >= seconds else "0x600"
        for bound in bounds
    } | {f'vllmsnapshot_start_seconds_bucket{{mode="{mode}",le="+Inf"}}': "0+1x600"}


ALIVE: Series = {'vllmsnapshot_build_info{component="operator"}': "1x600"}
FIRING: list[tuple[str, Series, str]] = [
    ("VLLMSnapshotNotReady", condition(c.READY, c.Reason.REPLICAS_NOT_READY, "0x600"), "16m"),
    (
        "VLLMSnapshotDown",
        {
            f"vllmsnapshot_snapshot_replicas_ready{{{SNAP}}}": "0x600",
            f"vllmsnapshot_snapshot_replicas_wanted{{{SNAP}}}": "2x600",
        },
        "11m",
    ),
    ("VLLMSnapshotDegraded", condition(c.DEGRADED, c.Reason.CAPTURE_FAILED, "1x600"), "11m"),
    (
        "VLLMSnapshotNoArtifact",
        condition(c.SNAPSHOT_READY, c.Reason.NO_ARTIFACT, "0x600") | {f"vllmsnapshot_snapshot_replicas_ready{{{SNAP}}}": "1x600"},
        "31m",
    ),
    ("VLLMSnapshotArtifactQuarantined", {f'vllmsnapshot_snapshot_artifacts{{{SNAP},state="quarantined"}}': "1x600"}, "6m"),
    (
        "VLLMSnapshotWrongAnswer",
        # The first one ever: the series is there before.
        {f'vllmsnapshot_restores_total{{{AGENT},result="failed",reason="CanaryMismatch"}}': "0x5 1x600"},
        "8m",
    ),
    (
        "VLLMSnapshotRestoresFail",
        {f'vllmsnapshot_restores_total{{{AGENT},result="failed",reason="RestoreFailed"}}': "0x5 3x600"},
        "20m",
    ),
    (
        "VLLMSnapshotCapturesFail",
        {f'vllmsnapshot_captures_total{{{AGENT},result="failed",reason="DumpFailed"}}': "0x5 3x600"},
        "20m",
    ),
    ("VLLMSnapshotRestoresNotWorthIt", starts("cold", 60) | starts("restore", 45), "2h"),
    ("VLLMSnapshotNodeNotCapable", {f"vllmsnapshot_agent_node_capable{{{AGENT}}}": "0x600"}, "16m"),
    (
        "VLLMSnapshotStoreFull",
        {
            f"vllmsnapshot_agent_store_room_bytes{{{AGENT}}}": "1000000000x600",
            f"vllmsnapshot_agent_store_largest_artifact_bytes{{{AGENT}}}": "1340000000x600",
        },
        "16m",
    ),
    ("VLLMSnapshotOperatorDown", {'vllmsnapshot_build_info{component="operator"}': "1x3 stale", 'up{job="x"}': "1x600"}, "12m"),
    ("VLLMSnapshotOperatorStuck", {f"vllmsnapshot_workqueue_oldest_seconds{{{OPERATOR}}}": "0+60x600"}, "6m"),
    (
        "VLLMSnapshotReconcileErrors",
        {
            f'vllmsnapshot_reconcile_total{{{OPERATOR},controller="snapshot",result="error"}}': "0+1x600",
            f'vllmsnapshot_reconcile_total{{{OPERATOR},controller="snapshot",result="success"}}': "0+4x600",
        },
        "30m",
    ),
    (
        "VLLMSnapshotApiErrors",
        {
            f'vllmsnapshot_api_requests_total{{{OPERATOR},verb="list",resource="pods",code="503"}}': "0+1x600",
            f'vllmsnapshot_api_requests_total{{{OPERATOR},verb="list",resource="pods",code="200"}}': "0+4x600",
        },
        "30m",
    ),
]
QUIET: Series = {
    **ALIVE,
    **condition(c.READY, c.Reason.ALL_REPLICAS_READY, "1x600"),
    **condition(c.DEGRADED, c.Reason.AS_EXPECTED, "0x600"),
    **condition(c.SNAPSHOT_READY, c.Reason.CAPTURE_DISABLED, "0x600"),
    f"vllmsnapshot_snapshot_replicas_ready{{{SNAP}}}": "0x600",
    f"vllmsnapshot_snapshot_replicas_wanted{{{SNAP}}}": "0x600",
    f'vllmsnapshot_snapshot_artifacts{{{SNAP},state="quarantined"}}': "0x600",
    f'vllmsnapshot_restores_total{{{AGENT},result="failed",reason="CanaryMismatch"}}': "1x600",
    f'vllmsnapshot_restores_total{{{AGENT},result="failed",reason="RestoreFailed"}}': "7x600",
    f'vllmsnapshot_captures_total{{{AGENT},result="failed",reason="SourceGone"}}': "0+1x600",
    **starts("cold", 60),
    **starts("restore", 5),
    f"vllmsnapshot_agent_node_capable{{{AGENT}}}": "1x600",
    f"vllmsnapshot_agent_store_free_bytes{{{AGENT}}}": "100000000000x600",
    f"vllmsnapshot_agent_store_largest_artifact_bytes{{{AGENT}}}": "1340000000x600",
    f"vllmsnapshot_workqueue_oldest_seconds{{{OPERATOR}}}": "5x600",
    f"vllmsnapshot_operator_resync_age_seconds{{{OPERATOR}}}": "29x600",
    f'vllmsnapshot_reconcile_total{{{OPERATOR},controller="snapshot",result="success"}}': "0+4x600",
    f'vllmsnapshot_reconcile_total{{{OPERATOR},controller="snapshot",result="error"}}': "0x600",
    f'vllmsnapshot_api_requests_total{{{OPERATOR},verb="list",resource="pods",code="200"}}': "0+4x600",
    f'vllmsnapshot_api_requests_total{{{OPERATOR},verb="patch",resource="pods",code="409"}}': "0+4x600",
}
"""A system in which all is well: counters stand where old trouble left them, and a snapshot sleeps at 0 replicas."""


def case(series: Series, at: str, expected: list[str]) -> dict[str, Any]:
    """A test of promtool: which alerts fire at that time."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": at,
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
            }
        ],
    }


@pytest.fixture(scope="module")
def promtool() -> Path:
    return fetched(Progress(quiet=True))


def test_prometheus_accepts_the_rules(promtool: Path) -> None:
    result = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(alerts())} rules found" in result.stdout


def test_every_alert_fires_alone_when_it_should_and_none_when_all_is_well(promtool: Path, tmp_path: Path) -> None:
    assert [name for name, _, _ in FIRING] == [rule["alert"] for rule in alerts()]
    cases = [case((ALIVE | series) if name != "VLLMSnapshotOperatorDown" else series, at, [name]) for name, series, at in FIRING]
    file = tmp_path / "alerts.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [*cases, case(QUIET, "3h", [])]}))
    result = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_queries_of_the_dashboard_are_promql(promtool: Path, tmp_path: Path) -> None:
    """As recording rules: promtool parses those."""
    plain = [
        query.replace("$__rate_interval", "5m")
        for panel in dashboard.dashboard()["panels"]
        for query in [target["expr"] for target in panel.get("targets", [])]
    ]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(plain)]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    result = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(plain)} rules found" in result.stdout
