"""The Grafana dashboard of the chart. Queries use the names that the code declares; a test looks for every name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vllmsnapshot import metrics as common
from vllmsnapshot.agent import metrics as agent
from vllmsnapshot.controller import metrics as operator

Panel = dict[str, Any]
Query = tuple[str, str]
"""Expression and legend."""

UID = "vllmsnapshot"
WIDTH = 24
"""Columns of a Grafana dashboard."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
MINE = 'namespace=~"$namespace",snapshot=~"$snapshot"'
RATE = "$__rate_interval"
EVENTS = "1m"
"""The shortest interval of a graph of what happens now and then."""

VLLM = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
)
"""vLLM's own metrics (vllm/v1/metrics/loggers.py of 0.32), as the chart's PodMonitor scrapes them."""
SNAPSHOT_LABEL = "vllmsnapshot_io_snapshot"
MODE_LABEL = "vllmsnapshot_io_start_mode"
"""The pod labels of a replica, as Prometheus spells them (podTargetLabels)."""

COLOURS = {
    "{{start_mode}}": {"restore": "green", "cold": "blue", "undecided": "yellow"},
    "{{" + MODE_LABEL + "}}": {"restore": "green", "cold": "blue"},
    "{{state}}": {
        "usable": "green",
        "ordered": "blue",
        "unusable": "yellow",
        "slower": "purple",
        "failed": "orange",
        "quarantined": "red",
    },
}
"""By legend, of series that are named by a state: what is good is the same colour everywhere."""

CONDITION_BAD = ',condition=~"Degraded|Stale"'
CONDITION_GOOD = ',condition=~"Ready|SnapshotReady"'
LEGEND = "{{condition}} {{namespace}}/{{snapshot}}: {{reason}}"


def panel(
    title: str, what: str, queries: Sequence[Query], *, kind: str = "timeseries", unit: str = "short", **more: Any
) -> Panel:
    """A panel without place and number. `what` is its description; `more` is for its defaults.

    `bars` and `rare` are for what happens now and then, a start or a capture: points are a minute apart at least, else one event
    would be in several bars, since a rate looks back over four scrapes. Between the points of `rare` there is nothing to show, so
    they are drawn, and joined.
    """
    stacked = more.pop("stacked", False)
    least = more.pop("min", 0)
    custom: dict[str, Any] = {"fillOpacity": 10, "stacking": {"mode": "normal" if stacked else "none"}}
    bars, rare = more.pop("bars", False), more.pop("rare", False)
    if bars:
        custom |= {"drawStyle": "bars", "fillOpacity": 80}
        if unit == "short":
            more.setdefault("decimals", 0)
    elif stacked:
        # Numbers of things that are there: they jump. Without lines, as that of one of which there is none would cover another's.
        custom |= {"lineInterpolation": "stepAfter", "lineWidth": 0, "fillOpacity": 60}
    if rare:
        custom |= {"showPoints": "always", "spanNulls": True, "fillOpacity": 0}
    return {
        **({"interval": EVENTS} if bars or rare else {}),
        "title": title,
        "description": what,
        "type": kind,
        "datasource": DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": least, "custom": custom if kind == "timeseries" else {}, **more},
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": name},
                    "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
                }
                for _, legend in queries
                for name, colour in COLOURS.get(legend, {}).items()
            ],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "textMode": "value"},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def stat(title: str, what: str, expr: str, *, unit: str = "short", bad_above: float | None = None, **more: Any) -> Panel:
    """One number, red above `bad_above`."""
    steps: list[dict[str, Any]] = [{"color": "green" if bad_above is not None else "blue", "value": None}]
    if bad_above is not None:
        steps.append({"color": "red", "value": bad_above})
    thresholds = {"mode": "absolute", "steps": steps}
    return panel(title, what, [(expr, "")], kind="stat", unit=unit, thresholds=thresholds, **more)


def quantile(q: float, family: common.Family, selector: str, by: str = "") -> str:
    """A quantile over all processes."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q}, sum by ({labels}) (rate({family.name}_bucket{{{selector}}}[{RATE}])))"


def mean(name: str, selector: str, by: str) -> str:
    """The mean of a histogram; nothing where nothing was observed."""
    total = f"sum by ({by})" if by else "sum"
    top, bottom = (f"{total} (rate({name}_{part}{{{selector}}}[{RATE}]))" for part in ("sum", "count"))
    return f"{top} / ({bottom} > 0)"


def increase(family: common.Family, by: str) -> str:
    """What happened per interval of the graph, without what did not."""
    return f"sum by ({by}) (increase({family.name}[{RATE}])) > 0"


def rows() -> list[tuple[str, list[tuple[int, int, Panel]]]]:
    """Rows by title: width, height and panel."""
    o, a, c = operator, agent, common
    vllm = f'{SNAPSHOT_LABEL}=~"$snapshot",namespace=~"$namespace"'
    # A container is scraped before the agent has said how it starts.
    started = f'{vllm},{MODE_LABEL}!=""'
    condition = f"max by (namespace, snapshot, condition, reason) ({o.CONDITION.name}{{{MINE}}})"
    return [
        (
            "Now",
            [
                (4, 4, stat("Ready replicas", "Replicas that serve.", f"sum({o.REPLICAS_READY.name}{{{MINE}}})")),
                (4, 4, stat("Wanted replicas", "Replicas that are asked for.", f"sum({o.WANTED.name}{{{MINE}}})")),
                (
                    4,
                    4,
                    stat(
                        "Restored",
                        "Share of the replicas that came up from an artifact.",
                        f'sum({o.REPLICAS.name}{{{MINE},start_mode="restore"}}) / sum({o.REPLICAS.name}{{{MINE}}})',
                        unit="percentunit",
                    ),
                ),
                (
                    4,
                    4,
                    stat(
                        "Breakers open",
                        "Quarantined artifacts: nothing is restored from them.",
                        f'sum({o.ARTIFACTS.name}{{{MINE},state="quarantined"}})',
                        bad_above=1,
                    ),
                ),
                (
                    4,
                    4,
                    stat(
                        "Nodes that cannot",
                        "Nodes with an agent that can neither capture nor restore.",
                        f"count({a.CAPABLE.name} == 0) or vector(0)",
                        bad_above=1,
                    ),
                ),
                (
                    4,
                    4,
                    stat(
                        "Speed-up",
                        "How many times faster the newest restored replica was than the newest cold one.",
                        f'avg({o.LAST_START.name}{{{MINE},start_mode="cold"}}) '
                        f'/ avg({o.LAST_START.name}{{{MINE},start_mode="restore"}})',
                        unit="suffix:x",
                        decimals=1,
                    ),
                ),
                (
                    12,
                    8,
                    panel(
                        "Replicas by start",
                        "How the replicas that are there came up.",
                        [(f"sum by (start_mode) ({o.REPLICAS.name}{{{MINE}}})", "{{start_mode}}")],
                        stacked=True,
                    ),
                ),
                (
                    12,
                    8,
                    panel(
                        "Conditions that need somebody",
                        "Degraded and Stale that are True, Ready and SnapshotReady that are not.",
                        [
                            (f"{condition.replace(MINE, MINE + CONDITION_BAD)} == 1", LEGEND),
                            (f"1 - ({condition.replace(MINE, MINE + CONDITION_GOOD)} == 0)", "not " + LEGEND),
                        ],
                        stacked=True,
                        noValue="None",
                    ),
                ),
            ],
        ),
        (
            "Starts",
            [
                (
                    12,
                    8,
                    panel(
                        "Pod creation to serving",
                        "Of pods that came up at the first try, all nodes and snapshots.",
                        [
                            (quantile(0.5, a.START_SECONDS, "", "mode"), "{{mode}}, median"),
                            (quantile(0.95, a.START_SECONDS, "", "mode"), "{{mode}}, 95 %"),
                        ],
                        unit="s",
                        rare=True,
                    ),
                ),
                (
                    12,
                    8,
                    panel(
                        "Phases of a restored start",
                        "Mean seconds of each phase.",
                        [(mean(a.START_PHASE_SECONDS.name, 'mode="restore",phase!="release"', "phase"), "{{phase}}")],
                        unit="s",
                        stacked=True,
                        bars=True,
                    ),
                ),
                (
                    12,
                    8,
                    panel(
                        "Starts and why",
                        "Containers that came to serve, by how they started and the reason; below, what agents decided.",
                        [
                            (increase(a.STARTS, "mode, reason"), "{{mode}}: {{reason}}"),
                            ("-1 * (" + increase(a.DECISIONS, "mode") + ")", "decided {{mode}}"),
                        ],
                        min=None,
                        bars=True,
                        stacked=True,
                    ),
                ),
                (
                    6,
                    8,
                    panel(
                        "From 0 replicas",
                        "From the scale-up to a ready replica.",
                        [(quantile(0.5, o.FROM_ZERO, ""), "median"), (quantile(0.95, o.FROM_ZERO, ""), "95 %")],
                        unit="s",
                        rare=True,
                    ),
                ),
                (
                    6,
                    8,
                    panel(
                        "After a crash",
                        "Engines that crashed or failed to come up: last beginning to serving.",
                        [(quantile(0.5, a.RESTART_SECONDS, "", "mode"), "{{mode}}, median")],
                        unit="s",
                        rare=True,
                    ),
                ),
            ],
        ),
        (
            "Captures and restores",
            [
                (
                    8,
                    8,
                    panel(
                        "Restores",
                        "By result and reason.",
                        [(increase(a.RESTORES, "result, reason"), "{{result}}: {{reason}}")],
                        bars=True,
                        stacked=True,
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Captures",
                        "By result and reason.",
                        [(increase(a.CAPTURES, "result, reason"), "{{result}}: {{reason}}")],
                        bars=True,
                        stacked=True,
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Phases of a capture",
                        "Mean seconds; while frozen, the replica stands still at its barrier.",
                        [(mean(a.CAPTURE_PHASE_SECONDS.name, "", "phase"), "{{phase}}")],
                        unit="s",
                        rare=True,
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Artifact sizes",
                        "Mean of the artifacts captured in the interval; all artifacts of the snapshot.",
                        [
                            (mean(a.ARTIFACT_BYTES.name, "", ""), "mean of the new ones"),
                            (f"sum({o.ARTIFACT_BYTES.name}{{{MINE}}})", "all"),
                        ],
                        unit="bytes",
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Artifacts of snapshots",
                        "By state.",
                        [(f"sum by (state) ({o.ARTIFACTS.name}{{{MINE}}})", "{{state}}")],
                        stacked=True,
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Failures in a row",
                        "At restore.failureBudget the breaker opens.",
                        [(f"{o.RESTORE_FAILURES.name}{{{MINE}}} > 0", "{{namespace}}/{{snapshot}}")],
                        noValue="None",
                    ),
                ),
            ],
        ),
        (
            "Nodes",
            [
                (
                    8,
                    8,
                    panel(
                        "Store",
                        "Bytes of artifacts, free on their disk, and what the next capture could have (with what would be evicted for it).",
                        [
                            (f"sum({a.STORE_USED.name})", "artifacts"),
                            (f"min({a.STORE_FREE.name})", "least free of a node"),
                            (f"min({a.STORE_ROOM.name})", "least room for a capture"),
                            (f"sum({a.STORE_QUOTA.name} < Inf)", "quotas"),
                        ],
                        unit="bytes",
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "In stores",
                        "Artifacts on all nodes, restores under way, and artifacts that full stores have evicted since their agents started.",
                        [
                            (f"sum by (state) ({a.HELD.name})", "{{state}}"),
                            (f"sum({a.IN_FLIGHT.name})", "restores"),
                            (f"sum by (standing) ({a.EVICTIONS.name}) > 0", "evicted, {{standing}}"),
                        ],
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Checks that fail",
                        "Number of nodes.",
                        [(f"count by (check) ({a.CHECK.name} == 0)", "{{check}}")],
                        noValue="None",
                    ),
                ),
            ],
        ),
        (
            "vLLM",
            [
                (
                    6,
                    8,
                    panel(
                        "Requests",
                        "Running and waiting in the replicas of the snapshot.",
                        [
                            (f"sum({VLLM[0]}{{{vllm}}})", "running"),
                            (f"sum({VLLM[1]}{{{vllm}}})", "waiting"),
                        ],
                    ),
                ),
                (
                    6,
                    8,
                    panel(
                        "Tokens per second",
                        "Of all replicas, by how they started.",
                        [(f"sum by ({MODE_LABEL}) (rate({VLLM[2]}{{{started}}}[{RATE}]))", "{{" + MODE_LABEL + "}}")],
                    ),
                ),
                (
                    6,
                    8,
                    panel(
                        "Seconds per token",
                        "Mean, by how the replica started: whether restored ones are as fast as cold ones.",
                        [(mean(VLLM[4], started, MODE_LABEL), "{{" + MODE_LABEL + "}}")],
                        unit="s",
                    ),
                ),
                (
                    6,
                    8,
                    panel(
                        "Time to first token",
                        "95 % of the requests.",
                        [(f"histogram_quantile(0.95, sum by (le) (rate({VLLM[3]}_bucket{{{vllm}}}[{RATE}])))", "95 %")],
                        unit="s",
                    ),
                ),
            ],
        ),
        (
            "Operator and agents",
            [
                (
                    8,
                    8,
                    panel(
                        "Passes",
                        "Per second, by result.",
                        [(f"sum by (controller, result) (rate({c.RECONCILE.name}[{RATE}]))", "{{controller}}: {{result}}")],
                        unit="ops",
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Length of passes",
                        "99 % are shorter.",
                        [
                            (quantile(0.99, c.RECONCILE_SECONDS, "", "controller"), "{{controller}}"),
                            (quantile(0.99, c.API_SECONDS, 'verb!="watch"'), "one request"),
                        ],
                        unit="s",
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Requests to the API server",
                        "Per second, by verb and code.",
                        [(f"sum by (verb, code) (rate({c.API_REQUESTS.name}[{RATE}]))", "{{verb}} {{code}}")],
                        unit="reqps",
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Waiting",
                        "Keys of the operator's queue that are due; reports of agents not on record yet.",
                        [(f"sum({o.QUEUE_DEPTH.name})", "queue"), (f"sum({a.OUTBOX.name})", "reports")],
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Getting on",
                        "The longest pass or wait; the age of the last complete resync.",
                        [(f"max({o.QUEUE_OLDEST.name})", "oldest"), (f"max({o.RESYNC_AGE.name})", "resync")],
                        unit="s",
                    ),
                ),
                (
                    8,
                    8,
                    panel(
                        "Memory",
                        "Resident bytes of the processes.",
                        [
                            (
                                f"process_resident_memory_bytes * on (instance, job) group_left (component) {c.BUILD_INFO.name}",
                                "{{component}}",
                            )
                        ],
                        unit="bytes",
                    ),
                ),
            ],
        ),
    ]


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A selection of label values, all by default."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def dashboard() -> dict[str, Any]:
    """The whole, with places and numbers."""
    panels: list[Panel] = []
    y = 0
    for title, content in rows():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}}
        )
        y += 1
        x = height = 0
        for wide, high, made in content:
            if x + wide > WIDTH:
                x, y, height = 0, y + height, 0
            panels.append({**made, "gridPos": {"h": high, "w": wide, "x": x, "y": y}})
            x, height = x + wide, max(height, high)
        y += height
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    wanted = operator.WANTED.name
    return {
        "uid": UID,
        "title": "VLLMSnapshot",
        "description": "vLLM replicas that start from a process snapshot.",
        "tags": ["vllmsnapshot", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("namespace", "Namespace", f"label_values({wanted}, namespace)"),
                variable("snapshot", "VLLMSnapshot", f'label_values({wanted}{{namespace=~"$namespace"}}, snapshot)'),
            ]
        },
        "panels": [{"id": number, **made} for number, made in enumerate(panels, 1)],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
