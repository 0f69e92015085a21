"""The agent's loop on real control volumes: every path of a replica, and the agent killed after every single deed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agentbox import PARIS, ROME, Box, NodeError, artifact
from vllmsnapshot import objects
from vllmsnapshot.agent import decide
from vllmsnapshot.agent.node import AGAIN_S
from vllmsnapshot.agent.nodeops import Health
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.constants import Reason
from vllmsnapshot.api.types import PodSettings, RestorePolicy, Toggle
from vllmsnapshot.world import Replica
from vllmsnapshot_child.protocol import Ending, Hello, Release, Restored


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


# --- cold, captured --------------------------------------------------------------------------------------------------


async def test_first_replica_starts_cold_is_captured_and_verified(box: Box) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.attended, start.reason) == ("cold", True, Reason.NO_ARTIFACT)
    assert box.ops.did == ["raise_pids a"]
    assert box.report("a").state == "Starting"

    box.ready(uid)
    await box.settle()
    release = box.files(uid).release
    assert release is not None
    assert (release.host, release.port, release.env["VLLMSNAPSHOT_PORT"]) == ("0.0.0.0", 8123, "8123")
    assert box.files(uid).hold is not None
    assert box.conditions("art") == {c.CAPTURED: Reason.CAPTURED}
    assert box.verified("a") == ("", "")

    box.serving(uid)
    await box.settle()
    assert box.verified("a") == ("True", Reason.VERIFIED)
    report = box.report("a")
    assert (report.start, report.reason, report.state, report.restarts) == ("cold", Reason.NO_ARTIFACT, "Serving", 0)
    assert {"schedule_s", "container_s", "decide_s", "ready_s", "load_s", "reload_s", "total_s"} <= report.phases.keys()
    assert box.pod("a")["metadata"]["labels"][c.LABEL_START_MODE] == c.START_COLD
    assert box.events() == {"ColdStarted", "CaptureStarted", "Captured"}


async def test_what_became_of_the_weights_is_in_the_status(box: Box) -> None:
    """The engine says it at the barrier; `kubectl describe` shows it."""
    await box.at_barrier()
    record = box.content("art")["status"]["artifact"]
    assert (record["weights"], record["weightsReason"]) == ("Keep", "as it was measured")


async def test_a_cold_start_is_told_what_restores_on_this_node_moved(box: Box) -> None:
    """Digests, which are compared once per boot, are not part of it; nor is it of interest to anybody else."""
    box.add_content("art", "gone", captured=True)
    await box.restored()
    start = box.files("uid-b").start
    assert start is not None
    assert start.restore_bytes_per_s is None
    uid = box.add_pod("c", identity="another")
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.restore_bytes_per_s) == ("cold", (1 << 30) // 2)


async def test_nothing_is_written_at_rest(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    await box.restored()
    writes, deeds = list(box.kube.writes), list(box.done)
    for _ in range(3):
        await box.settle()
    assert (box.kube.writes, box.done) == (writes, deeds)
    box.start()
    await box.settle()
    assert (box.kube.writes, box.done) == (writes, deeds)


@pytest.mark.parametrize("host_network", [True, False])
async def test_an_order_says_whose_network_it_is(box: Box, host_network: bool) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.kube.touch(box.pod("a"))["spec"]["hostNetwork"] = host_network
    box.sync()
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    await box.settle()
    assert [order.host_network for order in box.ops.orders] == [host_network]


async def test_a_failed_capture_releases_the_replica_and_says_why(box: Box) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.ops.broken["capture"] = NodeError(Reason.PREFLIGHT_INET_SOCKET, "tcp 127.0.0.1:1")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    await box.settle()
    assert box.files(uid).release is not None
    assert box.conditions("art") == {c.FAILED: Reason.PREFLIGHT_INET_SOCKET}
    box.serving(uid)
    await box.settle()
    assert box.verified("a") == ("True", Reason.VERIFIED)
    assert "CaptureFailed" in box.events()


@pytest.mark.parametrize("moment", ["before its hello", "after its hello"])
async def test_a_container_that_starts_over_during_its_capture_is_not_held_up(box: Box, moment: str) -> None:
    # The dump of a dead tree fails late: by then the next incarnation may stand at its own barrier.
    uid = box.add_pod("a")
    box.add_content("art", "a")

    def dies() -> None:
        if moment == "after its hello":
            box.hello(uid, "i2")

    box.ops.before["resumed"] = dies
    box.ops.broken["publish"] = NodeError(Reason.SOURCE_GONE, "the container ended during the capture")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    await box.settle()
    if moment == "before its hello":
        box.hello(uid, "i2")
        # A writer that had looked before the container started over.
        box.put(uid, Release(incarnation="i1", host=None, port=1))
    await box.settle()
    box.ready(uid, "i2")
    box.advance(uid, 6)
    await box.settle()
    release = box.files(uid).release
    assert release is not None
    assert release.incarnation == "i2"
    assert release.port == 8123


async def test_a_capture_that_fails_after_the_release_fails_the_order(box: Box) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.ops.broken["publish"] = OSError(28, "No space left on device")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    await box.settle()
    assert box.files(uid).release is not None
    assert box.conditions("art") == {c.FAILED: Reason.DUMP_FAILED}


async def test_without_an_order_the_barrier_lasts_for_the_grace(box: Box) -> None:
    uid = box.add_pod("a")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    await box.settle()
    assert box.files(uid).release is None
    assert box.report("a").state == "AtBarrier"
    box.advance(uid, 6)
    await box.settle()
    assert box.files(uid).release is not None


async def test_an_order_that_comes_after_the_release_fails(box: Box) -> None:
    uid = box.add_pod("a")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    box.advance(uid, 6)
    await box.settle()
    box.add_content("art", "a")
    await box.settle()
    assert box.conditions("art") == {c.FAILED: Reason.SOURCE_RELEASED}


async def test_an_order_whose_pod_is_gone_fails_only_on_a_live_answer(box: Box) -> None:
    box.add_content("art", "a")
    box.kube.down = True
    with pytest.raises(Exception, match="refused"):
        await box.settle()
    box.kube.down = False
    await box.settle()
    assert box.conditions("art") == {c.FAILED: Reason.SOURCE_GONE}


@pytest.mark.parametrize(
    ("settings", "health", "reason"),
    [
        (PodSettings(capture=Toggle.DISABLED), Health(capable=True), Reason.NO_ARTIFACT),
        (
            PodSettings(restore_policy=RestorePolicy.DISABLED, capture=Toggle.DISABLED),
            Health(capable=True),
            Reason.RESTORE_DISABLED,
        ),
        (PodSettings(), Health(capable=False, message="no CRIU"), Reason.NODE_NOT_CAPABLE),
    ],
)
async def test_cold_without_a_barrier(box: Box, settings: PodSettings, health: Health, reason: str) -> None:
    box.node.health = health
    uid = box.add_pod("a", settings=settings)
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.attended, start.reason) == ("cold", False, reason)
    box.serving(uid)
    await box.settle()
    assert box.verified("a") == ("True", Reason.VERIFIED)


async def test_a_failed_order_names_what_is_wrong_with_the_gpus(box: Box) -> None:
    box.node.health = Health(capable=True, gpu="gpu-mode: MIG is on")
    box.add_content("art", "a")
    uid = box.add_pod("a")
    box.kube.touch(box.pod("a"))["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    box.sync()
    box.hello(uid)
    await box.settle()
    content = box.kube.objects["vllmsnapshotcontents", "", "art"]
    assert "MIG is on" in objects.condition(content, c.FAILED)["message"]


@pytest.mark.parametrize("resources", [{"limits": {"nvidia.com/gpu": "1"}}, {"claims": [{"name": "gpu"}]}])
async def test_only_replicas_with_a_gpu_depend_on_the_gpus(box: Box, resources: dict[str, Any]) -> None:
    box.node.health = Health(capable=True, gpu="gpu-driver: NVIDIA driver 570 is too old")
    box.add_content("art", "gone", captured=True)
    with_gpu, without = box.add_pod("a"), box.add_pod("b")
    box.kube.touch(box.pod("a"))["spec"]["containers"][0]["resources"] = resources
    box.sync()
    for uid in (with_gpu, without):
        box.hello(uid)
    await box.settle()
    start = box.files(with_gpu).start
    assert start is not None
    assert (start.mode, start.attended, start.reason) == ("cold", False, Reason.NODE_NOT_CAPABLE)
    assert "570 is too old" in start.message
    start = box.files(without).start
    assert start is not None
    assert start.mode == "restore"


async def test_another_protocol_is_answered_with_an_unattended_cold_start(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("a")
    box.hello(uid, protocol=2)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.attended, start.reason) == ("cold", False, Reason.PROTOCOL_VERSION)


async def test_a_late_agent_does_not_decide_any_more(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("a")
    box.hello(uid)
    box.advance(uid, 9.5)
    await box.settle()
    assert box.files(uid).start is None
    box.advance(uid, 60)
    box.serving(uid)
    await box.settle()
    report = box.report("a")
    assert (report.start, report.reason, report.state) == ("cold", Reason.UNATTENDED, "Serving")


# --- restored --------------------------------------------------------------------------------------------------------


async def test_a_replica_with_an_artifact_is_restored_and_verified(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = await box.restored()
    assert box.ops.did == ["restore b art"]
    start, back = box.files(uid).start, box.files(uid).restored
    assert start is not None
    assert back is not None
    assert (start.mode, start.content, back.pid, back.content) == ("restore", "art", 1001, "art")
    assert box.verified("b") == ("True", Reason.VERIFIED)
    report = box.report("b")
    assert (report.start, report.content, report.state, report.reason) == ("restore", "art", "Serving", Reason.RESTORED)
    assert {"queue_s", "restore_s", "criu_s", "stage_s", "total_s"} <= report.phases.keys()
    status = box.kube.objects["vllmsnapshotcontents", "", "art"]["status"]
    assert status["restores"].pop("lastSucceededAt")
    assert status["restores"] == {"succeeded": 1, "failed": 0, "consecutiveFailures": 0}
    assert box.events() == {Reason.RESTORED}


async def test_the_replica_comes_up_while_the_api_server_is_down(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)
    box.kube.down = True
    await box.pods.settle(uid)
    assert box.files(uid).release is not None
    box.serving(uid)
    await box.pods.settle(uid)
    assert box.verified("b") == ("", "")
    box.kube.down = False
    await box.settle()
    assert box.verified("b") == ("True", Reason.VERIFIED)


async def test_a_failed_restore_starts_cold_in_the_same_container(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.ops.broken["restore"] = NodeError(Reason.RESTORE_FAILED, "criu said no")
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.attended, start.reason, start.message) == ("cold", True, Reason.RESTORE_FAILED, "criu said no")
    assert box.ops.did == ["restore b art", "clear b", "raise_pids b"]
    assert box.kube.objects["vllmsnapshotcontents", "", "art"]["status"]["restores"]["consecutiveFailures"] == 1
    assert {Reason.RESTORE_FAILED, "ColdStarted"} <= box.events()
    # The same pod does not try it again after a crash, another one does.
    box.ops.broken.clear()
    box.hello(uid, "i2")
    await box.settle()
    second = box.files(uid).start
    assert second is not None
    assert (second.mode, second.reason) == ("cold", Reason.RESTORE_FAILED)
    await box.restored("c")
    box.hello(uid, "i3")
    await box.settle()
    third = box.files(uid).start
    assert third is not None
    assert third.mode == "restore"


async def test_the_failure_budget_quarantines(box: Box) -> None:
    box.add_content("art", "gone", captured=True, budget=2)
    box.ops.broken["restore"] = NodeError(Reason.RESTORE_FAILED)
    for name in ("b", "d", "e"):
        box.hello(box.add_pod(name))
        await box.settle()
    assert box.ops.did.count("restore b art") + box.ops.did.count("restore d art") == 2
    assert "restore e art" not in box.ops.did
    assert box.conditions("art")[c.QUARANTINED] == Reason.FAILURE_BUDGET_SPENT
    start = box.files("uid-e").start
    assert start is not None
    assert start.reason == Reason.ARTIFACT_QUARANTINED


@pytest.mark.parametrize("reason", [Reason.INSUFFICIENT_MEMORY, Reason.INSUFFICIENT_DISK])
async def test_what_is_not_the_artifacts_fault_is_not_counted(box: Box, reason: str) -> None:
    box.add_content("art", "gone", captured=True, budget=1)
    box.ops.broken["restore"] = NodeError(reason)
    box.hello(box.add_pod("b"))
    await box.settle()
    assert c.QUARANTINED not in box.conditions("art")
    start = box.files("uid-b").start
    assert start is not None
    assert start.reason == reason


@pytest.mark.parametrize(
    ("deleted", "reason", "counted"),
    [
        (True, Reason.RESTORE_FAILED, False),
        (False, Reason.RESTORE_FAILED, True),
        (True, Reason.ARTIFACT_CORRUPT, True),
    ],
)
async def test_a_pod_that_is_deleted_during_its_restore_says_nothing_against_the_artifact(
    box: Box, deleted: bool, reason: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its PID 1 ends, and CRIU with it: an autoscaler that changes its mind three times would spend the budget of a good artifact."""
    box.add_content("art", "gone", captured=True, budget=1)
    uid = box.add_pod("b")

    def killed(*_: object) -> None:
        if deleted:
            box.kube.touch(box.pod("b"))["metadata"]["deletionTimestamp"] = objects.rfc3339(time.time())
            box.sync()
        raise NodeError(reason, "criu restore ended with status -9")

    monkeypatch.setattr(box.ops, "restore", killed)
    box.hello(uid)
    await box.settle()
    assert (c.QUARANTINED in box.conditions("art")) is counted


@pytest.mark.parametrize(("policy", "mode"), [(RestorePolicy.PREFER, "cold"), (RestorePolicy.REQUIRE, "refuse")])
async def test_the_operator_is_told_of_a_gpu_that_ran_out_of_memory(box: Box, policy: RestorePolicy, mode: str) -> None:
    box.add_content("art", "gone", captured=True)
    box.ops.broken["restore"] = NodeError(Reason.GPU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
    uid = box.add_pod("b", settings=PodSettings(restore_policy=policy))
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert start.mode == mode
    assert Replica.parse(box.pod("b")).discard
    # Counted: a GPU that always runs out ends in cold starts, not in one new pod after the other.
    assert box.node.ledger.entry("art", "uid-art").consecutive == 1


async def test_a_corrupt_artifact_is_quarantined_at_once(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.ops.broken["restore"] = NodeError(Reason.ARTIFACT_CORRUPT, "pages-1.img: digest")
    box.hello(box.add_pod("b"))
    await box.settle()
    assert box.conditions("art")[c.QUARANTINED] == Reason.ARTIFACT_CORRUPT


async def test_a_restored_tree_that_dies_is_counted_once(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    box.hello(uid, "i2", failed_restores={"art": "EngineFailed: boom"})
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.reason) == ("cold", Reason.RESTORE_DIED)
    box.hello(uid, "i3", failed_restores={"art": "EngineFailed: boom"})
    await box.settle()
    assert box.kube.objects["vllmsnapshotcontents", "", "art"]["status"]["restores"]["failed"] == 1
    assert box.report("b").restarts == 2


async def test_a_port_that_somebody_has_is_not_the_artifacts_fault(box: Box) -> None:
    box.add_content("art", "gone", captured=True, budget=1)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    box.hello(uid, "i2", failed_restores={"art": "BindFailed: port 8123 on all addresses: Address already in use"})
    await box.settle()
    assert c.QUARANTINED not in box.conditions("art")
    start = box.files(uid).start
    assert start is not None
    assert start.mode == "cold"
    assert "BindFailed: port 8123" in start.message


async def test_a_container_that_dies_during_the_restore_counts_as_a_failure(box: Box) -> None:
    # An OOM kill takes init with it: nobody is left to say so, and without counting it would go on for ever.
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    box.hello(uid, "i2")
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.reason) == ("cold", Reason.RESTORE_DIED)


async def test_a_canary_mismatch_said_by_init_quarantines_at_once(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    box.hello(uid, "i2", failed_restores={"art": "CanaryMismatch: text"})
    await box.settle()
    assert box.conditions("art")[c.QUARANTINED] == Reason.CANARY_MISMATCH


async def test_a_wrong_answer_is_never_ready_and_ends_the_container(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    box.serving(uid, oracle=ROME)
    await box.pods.settle(uid)
    assert "end b" in box.ops.did
    await box.node.outbox.drain()
    box.sync()
    await box.contents.settle("art")
    await box.node.outbox.drain()
    assert box.verified("b") == ("False", Reason.CANARY_MISMATCH)
    assert box.conditions("art")[c.QUARANTINED] == Reason.CANARY_MISMATCH
    assert Reason.CANARY_MISMATCH in box.events()
    box.sync()
    box.hello(uid, "i2")
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.reason) == ("cold", Reason.ARTIFACT_QUARANTINED)
    assert box.verified("b") == ("False", Reason.STARTING)


@pytest.mark.parametrize("theirs", [{"namespace": "other"}, {"uid": "snap-2"}])
async def test_a_forged_restored_file_condemns_no_artifact_of_others(box: Box, theirs: dict[str, str]) -> None:
    # The control volume is the workload's too: it may claim to have been restored from anything.
    box.add_content("theirs", "gone", captured=True)
    box.content("theirs")["spec"]["snapshotRef"] |= theirs
    box.sync()
    uid = box.add_pod("a")
    box.hello(uid)
    await box.settle()
    box.put(uid, Restored(incarnation="i1", pid=1001, content="theirs"))
    box.serving(uid, oracle=ROME)
    await box.pods.settle(uid)
    await box.node.outbox.drain()
    await box.contents.settle("theirs")
    await box.node.outbox.drain()
    assert c.QUARANTINED not in box.conditions("theirs")
    found = objects.condition(box.pod("a"), c.CONDITION_VERIFIED)
    assert found["status"] == "False"
    assert "Paris" not in found["message"], "the recorded answer of somebody else"


async def test_a_cold_server_that_changes_its_answer_condemns_what_was_captured_from_it(box: Box) -> None:
    uid = await box.at_barrier()
    box.serving(uid, oracle=ROME)
    await box.pods.settle(uid)
    assert box.ops.did[-1] == "end a"
    await box.contents.settle("art")
    await box.node.outbox.drain()
    assert box.conditions("art")[c.QUARANTINED] == Reason.CANARY_MISMATCH
    assert box.verified("a") == ("False", Reason.CANARY_MISMATCH)


async def test_verification_does_not_need_the_artifact_any_more(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    del box.kube.objects["vllmsnapshotcontents", "", "art"]
    box.ops.store.clear()
    box.sync()
    box.start()
    box.serving(uid)
    await box.settle()
    assert box.verified("b") == ("True", Reason.VERIFIED)


async def test_a_container_restart_takes_the_verification_back(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = await box.restored()
    box.hello(uid, "i2")
    await box.settle()
    assert box.verified("b") == ("False", Reason.STARTING)
    box.serving(uid, "i2")
    await box.settle()
    assert box.verified("b") == ("True", Reason.VERIFIED)
    assert box.report("b").restarts == 1


async def test_require_refuses_a_cold_start_while_there_is_an_artifact(box: Box) -> None:
    box.add_content("art", "gone", captured=True, budget=2)
    box.ops.broken["restore"] = NodeError(Reason.RESTORE_FAILED)
    uid = box.add_pod("b", settings=PodSettings(restore_policy=RestorePolicy.REQUIRE))
    for word, mode in (("i1", "refuse"), ("i2", "cold")):
        box.hello(uid, word)
        await box.settle()
        start = box.files(uid).start
        assert start is not None
        # The second failure spends the budget: what is quarantined must be taken again, by a cold start.
        assert start.mode == mode
    assert box.conditions("art")[c.QUARANTINED] == Reason.FAILURE_BUDGET_SPENT


async def test_only_so_many_restores_at_once(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.hello(box.add_pod("b", settings=PodSettings(max_concurrent_per_node=1)))
    other = box.add_pod("d", settings=PodSettings(max_concurrent_per_node=1))
    box.hello(other)
    assert box.pods.slots.take("uid-b", 1)
    assert await box.pods.settle(other) == 1.0
    queued = box.files(other)
    assert queued.start is not None
    assert queued.start.mode == "restore"
    assert queued.restored is None
    box.pods.slots.leave("uid-b")
    assert other in box.woken
    await box.pods.settle(other)
    assert box.files(other).restored is not None


async def test_a_queue_that_lasts_too_long_ends_in_a_cold_start(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("d", settings=PodSettings(max_concurrent_per_node=1))
    box.hello(uid)
    assert box.pods.slots.take("other", 1)
    await box.pods.settle(uid)
    box.advance(uid, 70)
    await box.pods.settle(uid)
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.reason) == ("cold", Reason.RESTORE_TIMEOUT)
    assert not [x for x in box.ops.did if x.startswith("restore")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"identity": "id-2"}, Reason.NO_ARTIFACT),
        ({"namespace": "other"}, Reason.NO_ARTIFACT),
        ({"uid": "snap-2"}, Reason.NO_ARTIFACT),
        ({"deleting": True}, Reason.NO_ARTIFACT),
        ({"files": "none"}, Reason.ARTIFACT_MISSING),
        ({"files": "of another"}, Reason.ARTIFACT_MISSING),
        ({"oracle": None}, Reason.ARTIFACT_CORRUPT),
        ({"uncaptured": True}, Reason.CAPTURE_IN_PROGRESS),
    ],
)
async def test_an_artifact_that_does_not_fit_is_not_used(box: Box, change: dict[str, object], reason: str) -> None:
    box.add_content("art", "gone", captured="uncaptured" not in change)
    obj = box.content("art")
    if "identity" in change:
        obj["spec"]["identity"] = change["identity"]
    for name in ("namespace", "uid"):
        if name in change:
            obj["spec"]["snapshotRef"][name] = change[name]
    if "deleting" in change:
        obj["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    if change.get("files") == "none":
        box.ops.store.clear()
    if change.get("files") == "of another":
        box.ops.store["art"] = artifact("art", "uid-before")
    if "oracle" in change:
        box.ops.store["art"] = replace(box.ops.store["art"], oracle=None)
    box.sync()
    uid = box.add_pod("b")
    box.hello(uid)
    await box.pods.settle(uid)
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.reason) == ("cold", reason)


# --- a node in trouble ---


async def test_a_disk_that_refuses_the_ledger_is_not_the_artifacts_fault(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.add_content("art", "gone", captured=True, budget=1)
    await box.settle()
    real = os.fsync

    def full(fd: int) -> None:
        if "/ledger/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.reason) == ("cold", Reason.INSUFFICIENT_DISK)
    assert not [x for x in box.ops.did if x.startswith("restore")], "nothing was begun that the next agent would not know of"
    assert c.QUARANTINED not in box.conditions("art")
    assert list((box.root / "ledger").glob(".*")) == [], "nothing piles up on a full disk"
    # Once there is space again, what was refused is written.
    monkeypatch.setattr(os, "fsync", real)
    await box.removal.collect()
    box.start()
    assert [a.outcome for a in box.node.ledger.entry("art", "uid-art").attempts] == ["failed"]
    await box.restored("d")


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
async def test_a_clock_that_is_set_during_a_restore_changes_nothing(box: Box, jump: float) -> None:
    # At boot, the time comes from the network while every replica of the node is being restored.
    box.add_content("art", "gone", captured=True, budget=1)
    uid = box.add_pod("b")
    box.hello(uid)

    def set_clock() -> None:
        box.wall += jump

    box.ops.before["restore"] = set_clock
    await box.settle()
    assert box.files(uid).restored is not None
    box.serving(uid)
    await box.settle()
    assert box.verified("b") == ("True", Reason.VERIFIED)
    assert c.QUARANTINED not in box.conditions("art")


async def test_a_clock_that_is_set_back_does_not_make_a_queue_endless(box: Box) -> None:
    # Init counts by the steady clock: when it starts another engine, nothing may be restored beside it.
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("d", settings=PodSettings(max_concurrent_per_node=1))
    box.hello(uid)
    assert box.pods.slots.take("other", 1)
    await box.pods.settle(uid)
    box.wall -= 7200.0
    box.steady += 130.0
    box.pods.slots.leave("other")
    await box.pods.settle(uid)
    assert not [x for x in box.ops.did if x.startswith("restore")]


async def test_a_clock_that_is_set_ahead_does_not_end_the_wait_for_an_order(box: Box) -> None:
    uid = box.add_pod("a")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    delay = await box.pods.settle(uid)
    assert delay is not None
    box.wall += 7200.0
    again = await box.pods.settle(uid)
    assert again is not None
    assert 0 < again <= delay
    assert box.files(uid).release is None


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
async def test_a_wrong_answer_ends_its_container_whatever_the_clock_says(box: Box, jump: float) -> None:
    uid = box.add_pod("a")
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    box.advance(uid, 6)
    await box.settle()
    box.serving(uid, oracle=ROME)
    box.wall += jump
    box.start()
    for _ in range(3):
        await box.pods.settle(uid)
        box.steady += 11.0
    # A container that said this is at least as old as the file has been seen for.
    assert min(box.ops.end_ages) < 60.0


async def test_a_tree_that_comes_back_too_late_is_taken_away(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)

    def slow() -> None:
        box.steady += 130.0

    box.ops.before["restore"] = slow
    await box.pods.settle(uid)
    assert box.files(uid).restored is None
    assert "restored" not in box.done, "the operation was told before it returned"


async def test_a_container_that_starts_over_during_its_restore_is_not_given_the_old_tree(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)

    def dies() -> None:
        del box.ops.before["restore"]
        box.hello(uid, "i2")

    box.ops.before["restore"] = dies
    await box.settle()
    files = box.files(uid)
    assert files.start is not None
    assert (files.incarnation, files.start.mode, files.start.reason) == ("i2", "cold", Reason.RESTORE_DIED)
    assert files.restored is None


async def test_an_unreadable_artifact_that_no_content_stands_for_is_collected(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.add_content("torn", "gone", captured=True, stored=False)
    box.ops.unreadable = {"torn", "orphan"}
    await box.removal.collect()
    assert box.ops.unreadable == {"torn"}, "a content that still exists is told of it first"


async def test_a_manifest_that_is_not_the_recorded_one_is_not_used(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.content("art")["status"]["artifact"] = {"bytes": 1, "digest": "sha256:other", "capturedAt": "2027-01-15T08:00:00Z"}
    box.sync()
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert start.mode == "cold"
    assert box.conditions("art")[c.QUARANTINED] == Reason.ARTIFACT_CORRUPT


# --- servers that do not report ---


def healthy(box: Box, name: str, *, since: float) -> None:
    """The kubelet's probes have passed for `since` seconds."""
    obj = box.kube.touch(box.pod(name))
    at = objects.rfc3339(time.time() - since)
    others = [x for x in obj["status"]["conditions"] if x["type"] != "ContainersReady"]
    obj["status"]["conditions"] = [*others, {"type": "ContainersReady", "status": "True", "lastTransitionTime": at}]
    box.sync()


async def test_a_pod_without_a_control_volume_is_ready_when_the_kubelet_says_so(box: Box) -> None:
    uid = box.add_pod("a")
    shutil.rmtree(Path(box.kubelet, "pods", uid))
    await box.settle()
    assert box.verified("a") == ("", "")
    healthy(box, "a", since=5)
    await box.settle()
    assert box.verified("a") == ("", "")
    healthy(box, "a", since=11)
    await box.settle()
    assert box.verified("a") == ("True", Reason.VERIFIED)
    assert (box.report("a").start, box.report("a").reason) == ("cold", Reason.UNATTENDED)


async def test_a_cold_server_that_cannot_write_is_ready_when_the_kubelet_says_so(box: Box) -> None:
    uid = box.add_pod("a")
    box.hello(uid)
    await box.settle()
    box.advance(uid, 60)
    healthy(box, "a", since=20)
    await box.settle()
    assert box.verified("a") == ("True", Reason.VERIFIED)
    # What the kubelet found of the container before does not count for the next one.
    box.hello(uid, "i2")
    await box.settle()
    assert box.verified("a") == ("False", Reason.STARTING)


async def test_on_the_nodes_network_the_kubelet_may_have_asked_somebody_else(box: Box) -> None:
    """Another process that has the port answers the probe while ours still starts."""
    uid = box.add_pod("a")
    box.kube.objects["pods", "default", "a"]["spec"]["hostNetwork"] = True
    box.hello(uid)
    await box.settle()
    box.advance(uid, 60)
    healthy(box, "a", since=20)
    await box.settle()
    assert box.verified("a")[0] != "True"


async def test_a_restored_server_is_never_believed_without_its_answer(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b")
    box.hello(uid)
    await box.settle()
    box.advance(uid, 60)
    healthy(box, "b", since=20)
    await box.settle()
    assert box.verified("b") == ("", "")


# --- vLLM's own snapshot child ---------------------------------------------------------------------------------------


async def test_a_foreign_server_is_asked_over_http(box: Box) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.hello(uid)
    await box.settle()
    box.ready(uid, protocol_version=None)
    await box.settle()
    assert box.ops.store["art"].foreign
    assert box.verified("a") == ("", "")
    box.answers[8123] = replace(PARIS, token_ids=[])
    await box.settle()
    assert box.verified("a") == ("True", Reason.VERIFIED)


async def test_a_foreign_server_with_a_wrong_answer_is_condemned(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.ops.store["art"] = replace(box.ops.store["art"], foreign=True)
    box.sync()
    uid = box.add_pod("b")
    box.hello(uid)
    box.answers[8123] = replace(ROME, token_ids=[])
    await box.pods.settle(uid)
    await box.node.outbox.drain()
    assert box.verified("b") == ("False", Reason.CANARY_MISMATCH)
    assert "end b" in box.ops.did


# --- deletion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoken", [c.NODE_PROTOCOL + 1, c.NODE_PROTOCOL + 7])
async def test_an_order_of_another_protocol_is_refused_and_the_replica_serves(box: Box, spoken: int) -> None:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.content("art")["spec"]["protocol"] = spoken
    box.sync()
    box.hello(uid)
    await box.settle()
    box.ready(uid)
    await box.settle()
    box.serving(uid)
    await box.settle()
    assert box.conditions("art") == {c.FAILED: Reason.PROTOCOL_VERSION}
    assert not box.ops.orders
    assert box.verified("a") == ("True", Reason.VERIFIED)


async def test_an_artifact_that_was_ordered_under_another_protocol_is_used(box: Box) -> None:
    """Its files are the agent's own matter; what they are is in the manifest."""
    box.add_content("art", "gone", captured=True)
    box.content("art")["spec"]["protocol"] = c.NODE_PROTOCOL + 1
    box.sync()
    uid = await box.restored()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.content) == ("restore", "art")


async def test_deleting_a_content_deletes_its_files_first(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.content("art")["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    box.sync()
    with box.node.using("art"):
        assert await box.contents.settle("art") == 1.0
        assert "art" in box.ops.store
    await box.settle()
    assert box.ops.store == {}
    assert ("vllmsnapshotcontents", "", "art") not in box.kube.objects


async def test_artifacts_that_no_content_stands_for_are_collected(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.ops.store["orphan"] = artifact("orphan", "uid-orphan")
    box.node.ledger.begin("orphan", "uid-orphan", "uid-x", "i", 0.0)
    box.kube.down = True
    with pytest.raises(Exception, match="refused"):
        await box.removal.collect()
    assert set(box.ops.store) == {"art", "orphan"}
    box.kube.down = False
    await box.removal.collect()
    assert set(box.ops.store) == {"art"}
    assert box.node.ledger.contents() == ()


async def test_files_that_are_lost_quarantine_the_content(box: Box) -> None:
    box.add_content("art", "gone", captured=True, stored=False)
    await box.settle()
    assert box.conditions("art") == {c.CAPTURED: Reason.CAPTURED, c.QUARANTINED: Reason.ARTIFACT_MISSING}


async def test_the_status_goes_on_where_a_replaced_disk_forgot(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    box.content("art")["status"]["restores"] = {
        "succeeded": 4,
        "failed": 2,
        "consecutiveFailures": 1,
    }
    box.sync()
    await box.settle()
    await box.restored()
    status = box.kube.objects["vllmsnapshotcontents", "", "art"]["status"]
    assert status["restores"].pop("lastSucceededAt")
    assert status["restores"] == {"succeeded": 5, "failed": 2, "consecutiveFailures": 0}


async def test_nothing_starts_in_a_terminating_pod(box: Box) -> None:
    """A SIGTERM that came before its PID 1 could hear it is not sent again: it would start, and serve for its grace period."""
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("b", deletionTimestamp="2027-01-01T00:00:00Z")
    box.hello(uid)
    await box.settle()
    start = box.files(uid).start
    assert start is not None
    assert (start.mode, start.reason) == ("refuse", Reason.POD_DELETED)
    assert box.kube.writes == []


@pytest.mark.parametrize("deleting", [True, False])
async def test_a_server_that_waits_for_its_end_gets_it(box: Box, deleting: bool) -> None:
    box.add_content("art", "gone", captured=True)
    uid = await box.restored()
    if deleting:
        box.kube.touch(box.pod("b"))["metadata"]["deletionTimestamp"] = objects.rfc3339(time.time())
        box.sync()
    before = list(box.ops.did)
    box.put(uid, Ending(incarnation="i1", exit_code=0, timeout_s=7.5))
    assert await box.pods.settle(uid) == AGAIN_S
    assert box.ops.did == [*before, "retire b"]
    # The server has given up waiting.
    box.advance(uid, 8)
    await box.settle()
    assert box.ops.did == [*before, "retire b"]
    # And the next life of the container has nothing to do with it.
    box.hello(uid, "i2")
    await box.settle()
    assert "retire b" not in box.ops.did[len(before) + 1 :]


async def test_a_server_whose_gpu_is_not_let_go_is_tried_again_and_then_left_alone(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = await box.restored()
    box.ops.broken["retire"] = NodeError(Reason.GPU_STATE_LOST)
    box.put(uid, Ending(incarnation="i1", exit_code=0, timeout_s=7.5))
    for _ in range(2):
        assert await box.pods.settle(uid) == AGAIN_S
    box.advance(uid, 8)
    await box.settle()
    assert box.ops.did.count("retire b") == 2


async def test_another_life_of_the_container_is_not_ended(box: Box) -> None:
    box.add_content("art", "gone", captured=True)
    uid = await box.restored()
    box.put(uid, Ending(incarnation="i1", exit_code=0, timeout_s=7.5))
    view = box.pods.observe(uid)
    assert view is not None
    box.put(uid, Hello(incarnation="i2"))
    await box.pods._do(view, decide.next_step(view))
    assert "retire b" not in box.ops.did


@pytest.mark.parametrize(
    ("gpu", "health", "how", "attended"),
    [
        (True, "", "restored", True),
        (True, "", "foreign", False),
        (True, "", "captured", True),
        (True, "", "cold", False),
        (True, None, "restored", False),
        (False, "", "restored", False),
        (False, "", "captured", False),
    ],
)
async def test_only_the_end_of_an_engine_that_the_driver_put_back_is_attended(
    box: Box, gpu: bool, health: str | None, how: str, attended: bool
) -> None:
    box.node.health = Health(capable=True, gpu=health)
    uid = box.add_pod("a")
    if how != "cold":
        box.add_content("art", "gone" if how == "restored" else "a", captured=how == "restored")
    if gpu:
        box.kube.touch(box.pod("a"))["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        box.sync()
    box.hello(uid)
    await box.settle()
    if how != "restored":
        box.ready(uid, protocol_version=None if how == "foreign" else 1)
        box.advance(uid, 6)
        await box.settle()
    release = box.files(uid).release
    assert release is not None
    assert release.attend_end is attended


async def test_a_pod_that_is_not_ours_is_left_alone(box: Box) -> None:
    uid = box.add_pod(
        "a", ownerReferences=[{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "y", "controller": True}]
    )
    box.hello(uid)
    await box.settle()
    assert box.files(uid).start is None


async def test_a_control_volume_that_lies_does_not_stop_the_agent(box: Box) -> None:
    uid = box.add_pod("a")
    directory = Path(box.kubelet, "pods", uid, "volumes", "kubernetes.io~empty-dir", c.CONTROL_VOLUME)
    for content in (b"not json", b"[]", b'{"incarnation": 7}', b"{" * 5000, b"x" * (2 << 20)):
        (directory / "hello.json").write_bytes(content)
        await box.settle()
        assert not (directory / "start.json").exists()
    (directory / "hello.json").unlink()
    (directory / "hello.json").symlink_to("/etc/hostname")
    await box.settle()
    assert not (directory / "start.json").exists()


# --- killed after every deed -----------------------------------------------------------------------------------------

Scene = Callable[[Box], Awaitable[str]]


async def scene_cold(box: Box) -> str:
    uid = box.add_pod("a")
    box.add_content("art", "a")
    box.hello(uid)
    return uid


async def scene_capture(box: Box) -> str:
    uid = await scene_cold(box)
    await box.settle()
    box.ready(uid)
    return uid


async def scene_restore(box: Box) -> str:
    box.add_content("art", "gone", captured=True)
    uid = box.add_pod("a")
    box.hello(uid)
    return uid


async def scene_restore_fails(box: Box) -> str:
    box.ops.broken["restore"] = NodeError(Reason.RESTORE_FAILED)
    return await scene_restore(box)


async def scene_serving(box: Box) -> str:
    uid = await scene_restore(box)
    await box.settle()
    box.serving(uid)
    return uid


async def scene_delete(box: Box) -> str:
    uid = await scene_serving(box)
    await box.settle()
    box.content("art")["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    box.sync()
    return uid


@pytest.mark.parametrize(
    "scene",
    [scene_cold, scene_capture, scene_restore, scene_restore_fails, scene_serving, scene_delete],
    ids=lambda x: x.__name__,
)
async def test_killed_after_any_deed(tmp_path: Path, scene: Scene) -> None:
    n = 0
    killed = True
    while killed:
        n += 1
        box = Box(tmp_path / str(n))
        uid = await scene(box)
        killed = await box.settle_with_kill(n)
        files = box.files(uid)
        where = f"after deed {n}"
        assert files.start is not None, where
        if scene is scene_cold:
            assert (files.start.mode, files.start.attended) == ("cold", True), where
        if scene is scene_capture:
            # Captured and Failed exclude each other, and the replica is released in any case.
            assert files.release is not None, where
            found = box.conditions("art")
            assert found in ({c.CAPTURED: Reason.CAPTURED}, {c.FAILED: Reason.AGENT_RESTARTED}), where
            assert ("art" in box.ops.store) == (c.CAPTURED in found), where
        if scene in (scene_restore, scene_restore_fails):
            # Never two engines: either the tree is back and released, or the container was cleared before "cold".
            if files.start.mode == "restore":
                assert files.restored is not None, where
                assert files.release is not None, where
            else:
                assert files.restored is None, where
                assert "clear a" in box.ops.did, where
                assert files.start.reason in (Reason.AGENT_RESTARTED, Reason.RESTORE_FAILED), where
            assert c.QUARANTINED not in box.conditions("art"), where
        if scene in (scene_serving, scene_delete):
            assert box.verified("a") == ("True", Reason.VERIFIED), where
            assert box.report("a").state == "Serving", where
        if scene is scene_serving:
            status = box.kube.objects["vllmsnapshotcontents", "", "art"]["status"]
            assert status["restores"]["succeeded"] == 1, where
        if scene is scene_delete:
            assert box.ops.store == {}, where
            assert ("vllmsnapshotcontents", "", "art") not in box.kube.objects, where
        # A server that comes up now is accepted, whatever happened before.
        box.serving(uid)
        await box.settle()
        assert box.verified("a") == ("True", Reason.VERIFIED), where
    assert n > 2
