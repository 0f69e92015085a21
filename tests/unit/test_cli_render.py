"""What the commands print, to the letter: fixed objects, a fixed width, no colours."""

from __future__ import annotations

import dataclasses
import itertools
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any, cast

import pytest
from rich.text import Text

from tests.chart import ROOT
from tests.unit.cliobjects import COLD, NOW, RESTORED, condition, content, pod, snapshot
from vllmsnapshot import __version__
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.api.crd import all_crds
from vllmsnapshot.api.types import PodReport
from vllmsnapshot.cli import artifacts, bench, describe, doctor, plot, status, timeline
from vllmsnapshot.cli.doctor import Finding
from vllmsnapshot.world import Content, Replica


def plain(lines: Sequence[Text]) -> str:
    return "\n".join(line.plain for line in lines) + "\n"


# --- status ----------------------------------------------------------------------------------------------------------


def test_status() -> None:
    found = [snapshot(), snapshot("broken", degraded="CaptureFailed", timings=None, snapshot=None)]
    assert plain(status.lines(found, NOW)) == (
        "NAME     READY   RESTORED   COLD   SNAPSHOT   COLD START   RESTORE   SPEED-UP   STATE                     AGE\n"
        "broken   2/2     1          1      Captured   -            -         -          Degraded: CaptureFailed   2h5m\n"
        "smol     2/2     1          1      Captured   40.90s       2.60s     15.7x      AllReplicasReady          2h5m\n"
    )
    assert plain(status.lines(found[:1], NOW, namespaces=True, width=60)) == (
        "NAMESPACE   NAME   READY   SNAPSHOT   STATE\ndefault     smol   2/2     Captured   AllReplicasReady\n"
    )
    [_, line] = status.lines(found[1:], NOW, wide=True)
    assert line.plain.endswith("-      -         vllm:0.32   boom"), "the message of the trouble, not of Ready"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"conditions": []}, "not seen by the operator"),
        ({"observedGeneration": 1}, "changed, not seen by the operator yet"),
        ({"conditions": [condition(c.READY, False, "RollingUpdate"), condition(c.PROGRESSING, True, "X")]}, "RollingUpdate"),
        (
            {"conditions": [condition(c.READY, True, "AllReplicasReady"), condition(c.PROGRESSING, True, "Recapturing")]},
            "Recapturing",
        ),
        (
            {"conditions": [condition(c.READY, True, "X"), condition(c.STALE, True, "EnvironmentChanged")]},
            "Stale: EnvironmentChanged",
        ),
    ],
)
def test_the_state_is_the_condition_that_matters_most(change: dict[str, Any], expected: str) -> None:
    assert status.state(snapshot(**change)).text == expected


def test_a_snapshot_that_nobody_has_looked_at_yet_has_a_line() -> None:
    new = snapshot()
    del new["status"]
    assert plain(status.lines([new], NOW)).splitlines()[1].split()[:5] == ["smol", "0/2", "0", "0", "-"]


# --- describe --------------------------------------------------------------------------------------------------------

DESCRIBED = """\
Name:         smol (namespace default, 2h5m old)
Model:        /models/smollm2
Image:        vllm:0.32
Replicas:     2 of 2 ready: 1 restored, 1 cold
Artifact:     smol-5d7bed9722afb019 on node node-a, 1.34 GB, captured 61m ago
Timings:      cold 40.90s, restored 2.60s, faster 15.7x, frozen for the capture 0.80s
Conditions:
  Ready          True    AllReplicasReady: all 2 replicas are ready
  SnapshotReady  True    Captured: new replicas are restored on 1 node: node-a
  Progressing    False   Stable: nothing to do
  Degraded       False   AsExpected: no trouble
  Stale          False   AsExpected: every artifact fits its node

Replicas
  smol-6366c-0  cold in 40.9 s  ready  on node-a, 63m old
    NoArtifact: no artifact on this node
    → the first replica on a node is captured; the next ones there are restored
    schedule               0.40 s  ▍
    container              0.90 s  ▉
    decide                 0.02 s   ▏
    to barrier             36.0 s   ████████████████████████████████▋
      engine               30.0 s   ███████████████████████████▏
      canary               0.50 s                              ▌
      rehearse reload      3.00 s                              ██▊
    capture                2.40 s                                   ██▏
    to serving             1.00 s                                     ▉
      reload weights       0.70 s                                     ▋
  smol-6366c-1  restored in 2.60 s  ready  on node-a, 100s old
    from smol-5d7bed9722afb019
    schedule               0.10 s  ▏
    container              0.90 s  ▉
    decide                 0.01 s  ▏
    restore                1.20 s  █▏
      check artifact       0.10 s  ▏
      criu                 0.90 s   ▉
    to serving             0.40 s   ▍

Artifacts
  NAME                    NODE     STATE      SIZE      CAPTURED
  smol-5d7bed9722afb019   node-a   Captured   1.34 GB   61m
  smol-bad                node-a   Failed     -         -
"""


def test_describe() -> None:
    pods = [pod("smol-6366c-1", RESTORED, age=100), pod("smol-6366c-0", COLD)]
    contents = [content(), content("smol-bad", kind=c.FAILED, reason="DumpFailed")]
    assert plain(describe.lines(describe.Facts(snapshot(), pods, contents), NOW, width=72)) == DESCRIBED
    made = describe.structured(describe.Facts(snapshot(), pods, None))
    assert made["artifacts"] is None
    assert made["replicas"][0]["report"]["phases"]["restore_s"] == 1.2


def test_the_screen_in_the_docs_is_what_is_printed() -> None:
    assert f"```text\n{DESCRIBED}```" in (ROOT / "docs/cli.md").read_text()


def test_describe_without_the_right_to_see_contents_says_so_and_shows_the_rest() -> None:
    text = plain(describe.lines(describe.Facts(snapshot(), [], None), NOW))
    assert "you may not list vllmsnapshotcontents" in text
    assert "Replicas: none" in text


def test_describe_tells_what_keeps_a_replica_from_serving() -> None:
    broken = pod(
        "smol-x", PodReport(start="cold", reason="RestoreTimeout", message="art was not restored", state="Failed"), ready=False
    )
    broken["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}}]
    broken["status"]["conditions"][1] |= {"status": "False", "reason": "EngineFailed", "message": "no memory"}
    text = plain(
        describe.lines(describe.Facts(snapshot(recapture={"phase": "Running", "message": "x starts"}), [broken], []), NOW)
    )
    assert "RestoreTimeout: art was not restored" in text
    assert "→ raise spec.restore.timeoutSeconds" in text
    assert "CrashLoopBackOff: back-off" in text
    assert "not verified: EngineFailed: no memory" in text
    assert "Recapture:    Running: x starts" in text


def test_every_hint_belongs_to_a_reason_that_exists() -> None:
    assert set(describe.HINTS) <= {value for name, value in vars(Reason).items() if name.isupper()}


@pytest.mark.parametrize("report", [COLD, RESTORED])
def test_no_phase_of_a_report_is_invisible_and_none_leaves_the_frame(report: PodReport) -> None:
    found = timeline.spans(report.start, report.phases)
    lines = timeline.lines(found, 40.9, 80)
    assert all(len(line.plain) <= 80 for line in lines)
    assert all(line.plain.rstrip()[-1] in timeline.BLOCKS for line in lines)
    assert [line.plain.split()[-1] for line in timeline.lines(found, 40.9, 40)] == ["s"] * len(found), "no room for bars: figures"
    assert [span.at for span in found if not span.depth] == sorted(span.at for span in found if not span.depth)


def test_a_start_without_a_barrier_is_shown_by_its_parts() -> None:
    phases = {"container_s": 1.0, "import_s": 6.0, "engine_s": 17.0, "canary_s": 14.0, "total_s": 39.0}
    found = [(span.name, span.at, span.depth) for span in timeline.spans("cold", phases)]
    assert found == [("container", 0.0, 0), ("import", 1.0, 0), ("engine", 7.0, 0), ("canary", 24.0, 0)]


def test_a_report_without_phases_has_no_timeline() -> None:
    assert timeline.spans("cold", {}) == []
    assert timeline.bar(0.0, 1.0, 0.0, 10) == ""


# --- artifacts -------------------------------------------------------------------------------------------------------

VERIFICATION = {
    "request": "r",
    "outcome": "Corrupt",
    "message": "pages-1.img has changed",
    "took": "3.10s",
    "finishedAt": "2027-01-15T07:59:30Z",
}

INSPECTED = """\
Name:         smol-5d7bed9722afb019
Snapshot:     default/smol
Node:         node-a
Source:       pod smol-6366c-0
Identity:     id-1
State:        Captured
Size:         1.34 GB (1340000000 bytes)
Captured:     2027-01-15T06:58:20Z (61m ago)
Digest:       sha256:abc
Restores:     4 succeeded, 1 failed (0 in a row, budget 3)
              RestoreDied: x
Verified:     Corrupt: pages-1.img has changed, in 3.10s, 2027-01-15T07:59:30Z

Capture
  freeze               0.80 s  ██████████
  criu                 0.60 s  ███████▌
  digest               1.10 s  █████████████▊
  total                2.40 s  ██████████████████████████████

Environment at capture (a restore compares it)
  criuVersion           4.2.1
  kernelRelease         6.18.0
"""


def test_artifacts_inspect() -> None:
    assert plain(artifacts.inspect(content(verification=VERIFICATION), NOW)) == INSPECTED
    failed = plain(artifacts.inspect(content(kind=c.FAILED, reason="DumpFailed", message="criu: no"), NOW))
    assert "State:        Failed: DumpFailed: criu: no\n" in failed
    item = content()
    why = "the last 3 restores took 9.0, 9.0 and 9.0 s until they served, a cold start 8.0 s"
    item["status"]["conditions"].append(condition(c.SLOWER, True, "RestoreSlower", why))
    item["status"]["artifact"]["coldStart"] = "8.00s"
    item["status"]["environment"]["cpuFlags"] = "avx sse"
    slower = plain(artifacts.inspect(item, NOW))
    assert f"State:        Slower: {why}\n" in slower
    assert "Cold start:   8.00s\n" in slower
    assert "  cpuFlags              2 flags\n" in slower


def test_artifacts_list() -> None:
    found = [content(verification=VERIFICATION), content("ordered", kind="Waiting"), content("q", kind=c.QUARANTINED, reason="X")]
    items = [Content.parse(item) for item in found]
    owners = {item["metadata"]["name"]: artifacts.owner(item) for item in found}
    assert plain(artifacts.lines(items, NOW, owners=owners)) == (
        "NAME                    SNAPSHOT       NODE     STATE         SIZE      CAPTURED   RESTORES         VERIFIED\n"
        "ordered                 default/smol   node-a   Ordered       -         -          -                -\n"
        "q                       default/smol   node-a   Quarantined   -         -          -                -\n"
        "smol-5d7bed9722afb019   default/smol   node-a   Captured      1.34 GB   61m        4 ok, 1 failed   Corrupt 30s ago\n"
    )


NODES = [{"metadata": {"name": "node-a"}}]


def garbage(
    *contents: dict[str, Any], snapshots: Sequence[dict[str, Any]] = (), nodes: Any = NODES, **fields: Any
) -> dict[str, str]:
    found = artifacts.garbage(snapshots or [snapshot(**fields)], contents, [], nodes, [])
    return {item.content.name: item.why for item in found}


def test_gc_tells_what_the_operator_would_remove_and_why() -> None:
    old, older = content("old", age=5000.0), content("other", identity="id-0", age=9000.0)
    assert garbage(content("new", age=100.0), old) == {"old": "superseded by new"}
    assert garbage(content("new"), older) == {"other": "beyond artifact.retain"}
    assert garbage(content("new"), content("open", kind="Ordered")) == {}


def test_gc_tells_what_nobody_removes() -> None:
    orphan = content("orphan", owner="uid-gone")
    [found] = artifacts.garbage([snapshot()], [orphan], [], NODES, [])
    assert found.retained
    assert "deletionPolicy was Retain" in found.why
    assert garbage(content("lost", node="gone")) == {"lost": "node gone does not exist any more"}
    assert garbage(content("lost", node="gone"), nodes=None) == {}, "who may not list nodes knows of none that is gone"


def test_gc_waits_for_the_operator_to_tell_what_fits_the_spec() -> None:
    new = snapshot(identity="")
    assert garbage(content("a"), content("b", age=1.0), snapshots=[new]) == {}
    leaving = snapshot()
    leaving["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    assert garbage(content("a"), content("b", age=1.0), snapshots=[leaving]) == {}


def test_gc_tells_what_a_full_store_would_evict_by_the_agents_rule() -> None:
    mine, idle, bad = content("mine"), content("idle", owner="uid-2", age=50.0), content("bad", owner="uid-3")
    bad["status"]["conditions"].append(condition(c.QUARANTINED, True, "CanaryMismatch"))
    here = pod("a", COLD)
    here["spec"] = {"nodeName": "node-a"}
    found = artifacts.next_to_go([mine, idle, bad, content("open", kind="Ordered")], [here], [])
    assert [(item.content, item.place) for item in found] == [("bad", 1), ("idle", 2)]
    assert plain(artifacts.next_lines(found)) == (
        "NODE     GOES   NAME   SNAPSHOT       SIZE      WHY\n"
        "node-a   1      bad    default/smol   1.34 GB   quarantined\n"
        "node-a   2      idle   default/smol   1.34 GB   no replica of its identity is on the node\n"
    )


def test_a_node_with_a_quota_says_so() -> None:
    made = report("node-a", ("kernel", "Pass"))
    made["status"] |= {"storeBytesQuota": 500_000_000_000, "storeBytesUsed": 120_000_000_000}
    [found] = doctor.node(made, frozenset({"node-a"}))
    assert found.message == "1 checks passed; 0 artifacts, 120 of 500 GB quota, 42 GB free"


def test_gc_lines() -> None:
    found = artifacts.garbage([snapshot()], [content("new", age=1.0), content("old"), content("o", owner="x")], [], NODES, [])
    assert plain(artifacts.garbage_lines(found)) == (
        "NAME   SNAPSHOT       NODE     SIZE      WHY\n"
        "o      default/smol   node-a   1.34 GB   its snapshot was deleted, and artifact.deletionPolicy was Retain (--retained)\n"
        "old    default/smol   node-a   1.34 GB   superseded by new\n"
    )


# --- doctor ----------------------------------------------------------------------------------------------------------


def workload(kind: str, name: str, **status: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/version": __version__}
    return {
        "kind": kind,
        "metadata": {"namespace": "sys", "name": name, "labels": labels},
        "spec": {"replicas": 1},
        "status": status,
    }


def installed() -> list[dict[str, Any]]:
    return [{**item, "status": {"conditions": [{"type": "Established", "status": "True"}]}} for item in all_crds().values()]


def levels(found: Sequence[Finding]) -> list[str]:
    return [item.level for item in found]


def test_doctor_crds() -> None:
    assert levels(doctor.crds(installed())) == ["Pass"] * 3
    assert levels(doctor.crds([])) == ["Fail"] * 3
    old = installed()
    del old[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["recapture"]
    [first, *_] = doctor.crds(old)
    assert (first.level, first.message) == ("Warn", f"is not that of {__version__}: it does not know .status.recapture")
    taken = installed()
    taken[0]["status"] = {"conditions": [{"type": "NamesAccepted", "status": "False", "message": "name taken"}]}
    assert (doctor.crds(taken)[0].level, doctor.crds(taken)[0].message) == ("Fail", "name taken")


def test_doctor_kubernetes_version() -> None:
    assert doctor.version({"gitVersion": "v1.36.3"}).level == "Pass"
    assert doctor.version({"gitVersion": "v1.29.9-eks-1"}).level == "Fail"


def test_doctor_operator_and_agents() -> None:
    up = workload("Deployment", "op", availableReplicas=1)
    assert doctor.operator([up]).level == "Pass"
    assert doctor.operator([]).level == "Fail"
    assert "two operators" in doctor.operator([up, up]).message
    stopped = workload("Deployment", "op")
    stopped["spec"]["replicas"] = 0
    assert "scale deployment op --replicas=1" in doctor.operator([stopped]).remedy
    assert doctor.operator([{**up, "spec": {"replicas": 2}}]).level == "Fail"
    agents = [
        doctor.agents([workload("DaemonSet", "a", desiredNumberScheduled=wanted, numberReady=ready)]).level
        for wanted, ready in ((2, 2), (2, 1), (2, 0), (0, 0))
    ]
    assert agents == ["Pass", "Warn", "Fail", "Fail"]
    assert doctor.agents([]).level == "Fail"
    old = workload("DaemonSet", "a")
    old["metadata"]["labels"]["app.kubernetes.io/version"] = "0.0.1"
    assert [item.message for item in doctor.images([old, up])] == [f"DaemonSet 0.0.1; this plugin is {__version__}"]


def report(name: str, *checks: tuple[str, str], ready: bool = True) -> dict[str, Any]:
    found = [{"name": x, "status": y, "message": f"{x} says", "remedy": f"mend {x}"} for x, y in checks]
    conditions = [condition(c.READY, ready, "AsExpected", "all checks passed")]
    return {"metadata": {"name": name}, "status": {"conditions": conditions, "checks": found, "storeBytesFree": 42_000_000_000}}


DOCTOR = """\
Cluster
  ok    operator: sys/op is available

Node node-a
  ok    ready: 2 checks passed; 0 artifacts, 42 GB free

Node node-b
  FAIL  agent: its agent is not ready; what it said last is shown
        → see the agent's log
  FAIL  criu: criu says
        → mend criu
  warn  memory: memory says
        → mend memory

Node node-c
  FAIL  agent: its agent has written no report
        → see the agent's log

Snapshot default/smol
  FAIL  CaptureFailed: boom
        → kubectl vsnap describe smol -n default

7 checks: 4 failed, 1 with a warning
"""


def test_doctor_lines() -> None:
    reports = [
        report("node-b", ("kernel", "Pass"), ("criu", "Fail"), ("memory", "Warn"), ready=False),
        report("node-a", ("kernel", "Pass"), ("criu", "Pass")),
    ]
    found = [
        doctor.operator([workload("Deployment", "op", availableReplicas=1)]),
        *doctor.nodes(reports, frozenset({"node-a", "node-c"})),
        *doctor.snapshots([snapshot(degraded="CaptureFailed"), snapshot("fine")]),
    ]
    assert plain(doctor.lines(found)) == DOCTOR


def test_every_failed_check_has_a_remedy() -> None:
    found = [
        *doctor.crds([]),
        doctor.operator([]),
        doctor.agents([]),
        doctor.version({"gitVersion": "v1.1"}),
        doctor.rights("operator", [doctor.SERVICE_RIGHTS["operator"][0]]),
        *doctor.nodes([{"metadata": {"name": "n"}}, report("m", ready=False)], None),
    ]
    assert all(item.level != "Pass" and item.remedy for item in found), found


# --- bench -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slower_after", "made"), [(None, 5), (3, 3)])
async def test_a_bench_ends_where_the_node_finds_restores_slower(
    slower_after: int | None, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    starts = itertools.count()

    async def wait(_self: Any, what: str, _check: Any) -> Any:
        if "serve" not in what:
            return True
        slower = slower_after is not None and next(starts) >= slower_after
        told = PodReport(start="cold", reason="RestoreSlower", message="9.0 s", state="Serving", phases={"total_s": 9.0})
        return Replica.parse(pod("a", told if slower else RESTORED))

    async def scale(_self: Any, _replicas: int) -> None:
        """Nobody is there."""

    monkeypatch.setattr(bench._Bench, "_wait", wait)
    monkeypatch.setattr(bench._Bench, "_scale", scale)
    runs = await bench._Bench(cast(Any, None), "default", "smol-bench-1", 1.0, said.append).restored(5)
    assert [run.kind for run in runs] == [bench.RESTORED] * made
    assert ("no more is restored: 9.0 s" in said) == (slower_after is not None)


RUNS = [
    bench.Run(bench.COLD, 36.1, "node-a", {"schedule_s": 0.4, "container_s": 0.9, "release_to_serving_s": 34.0}, ""),
    bench.Run(bench.CAPTURED, 40.9, "node-a", dict(COLD.phases), ""),
    bench.Run(bench.RESTORED, 2.8, "node-a", dict(RESTORED.phases), ""),
    bench.Run(bench.RESTORED, 2.6, "node-a", dict(RESTORED.phases), ""),
    bench.Run(bench.RESTORED, 2.4, "node-a", dict(RESTORED.phases), ""),
]


def test_bench_table() -> None:
    assert plain(bench.lines(RUNS)).splitlines()[:6] == [
        "START            RUNS   MEDIAN   FASTEST   SLOWEST   SCHEDULE   CONTAINER   ENGINE OR RESTORE   TO SERVING",
        "cold             1      36.1 s   36.1 s    36.1 s    0.40 s     0.90 s      -                   34.0 s",
        "cold, captured   1      40.9 s   40.9 s    40.9 s    0.40 s     0.90 s      36.0 s              1.00 s",
        "restored         3      2.60 s   2.40 s    2.80 s    0.10 s     0.90 s      1.20 s              0.40 s",
        "",
        "Restored 13.9 times faster than cold.",
    ]
    made = bench.structured("smol", RUNS)
    assert made["medians"] == {"cold": 36.1, "cold, captured": 40.9, "restored": 2.6}
    assert bench.speedup(RUNS[:1]) is None
    assert bench.speedup(RUNS[1:]) == pytest.approx(40.9 / 2.6)


def test_bench_copies_what_shapes_the_process_and_nothing_that_others_select() -> None:
    original = snapshot("n" * 52)
    original["spec"] |= {
        "args": ["--max-model-len=64"],
        "serving": {"port": 9000, "hostNetwork": "Enabled", "portRange": {"start": 1, "end": 2}},
        "podTemplate": {
            "metadata": {"labels": {"app": "x"}, "annotations": {"a": "b"}},
            "spec": {"nodeSelector": {"gpu": "yes"}},
        },
    }
    made = bench.manifest(original, "ab12")
    assert made["metadata"]["name"] == "n" * 40 + "-bench-ab12"
    assert len(made["metadata"]["name"]) <= 52, "as the CRD demands"
    assert made["metadata"]["labels"] == {c.LABEL_BENCH: "n" * 52}
    assert made["metadata"]["ownerReferences"][0]["uid"] == original["metadata"]["uid"], "it goes with the original"
    spec = made["spec"]
    assert (spec["model"], spec["image"], spec["args"]) == ("/models/smollm2", "vllm:0.32", ["--max-model-len=64"])
    assert (spec["replicas"], spec["capture"]["policy"]) == (0, "Disabled")
    assert spec["serving"] == {**original["spec"]["serving"], "service": "Disabled"}
    assert spec["podTemplate"] == {"metadata": {"annotations": {"a": "b"}}, "spec": {"nodeSelector": {"gpu": "yes"}}}
    assert original["spec"]["podTemplate"]["metadata"]["labels"] == {"app": "x"}, "the original is not touched"


def test_the_plot_is_an_svg_whose_bars_add_up() -> None:
    odd = dataclasses.replace(RUNS[0], kind="<&>")
    root = ET.fromstring(plot.svg("a & b < c", [odd, *RUNS[1:]]))
    space = "{http://www.w3.org/2000/svg}"
    bars = [item for item in root.iter(f"{space}rect") if item.get("height") == str(plot.BAR)]
    scale = (plot.WIDTH - plot.LEFT - plot.RIGHT) / 40.9
    for i, run in enumerate([odd, *RUNS[1:]]):
        mine = [bar for bar in bars if bar.get("y") == str(plot.TOP + plot.ROW * i)]
        assert sum(float(bar.get("width") or 0) for bar in mine) == pytest.approx(run.seconds * scale, abs=1.0 + len(mine) * 0.5)
    assert "<&>" in [item.text for item in root.iter(f"{space}text")]
    assert set(plot.COLOURS) >= {span.name for run in RUNS for span in bench.spans(run)}


@pytest.mark.parametrize(("longest", "step"), [(0.004, 0.0005), (2.6, 0.5), (40.9, 10.0), (8.0, 1.0), (300.0, 50.0)])
def test_the_lines_of_the_plot_are_at_round_numbers(longest: float, step: float) -> None:
    assert plot.tick(longest) == pytest.approx(step)
    assert longest / step <= plot.TICKS


def test_the_legend_of_the_plot_stays_on_it() -> None:
    phases = dict.fromkeys(("schedule_s", "container_s", "decide_s", "import_s", "engine_s", "canary_s", "bind_s"), 3.0)
    runs = [bench.Run(bench.COLD, 21.0, "n", phases), *RUNS]
    root = ET.fromstring(plot.svg("t", runs))
    space = "{http://www.w3.org/2000/svg}"
    keys = [item for item in root.iter(f"{space}rect") if item.get("height") == "12"]
    assert {item.get("fill") for item in keys} >= {plot.COLOURS[name] for name in ("import", "engine", "canary", "restore")}
    bottom = float(root.get("viewBox", "").split()[3])
    for item in keys:
        assert float(item.get("x", "0")) < plot.WIDTH - 60
        assert float(item.get("y", "0")) + 12 < bottom
