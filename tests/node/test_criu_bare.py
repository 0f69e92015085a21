"""Capture and restore with real CRIU, in bare containers (namespaces, overlay root, cgroups), without Kubernetes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disks import Disk, on_a_disk
from tests.node.bare import Bare, app, prefix
from vllmsnapshot.agent.accelerator import Cpu
from vllmsnapshot.agent.capture import CAP_SYS_RESOURCE, CaptureRequest, CaptureResult, capture, has_capability, resume
from vllmsnapshot.agent.config import Config
from vllmsnapshot.agent.containers import find, is_criu, wait_dead
from vllmsnapshot.agent.criu import Criu, Outcome
from vllmsnapshot.agent.errors import CaptureError, RestoreError, StoreError
from vllmsnapshot.agent.local import LocalOps
from vllmsnapshot.agent.nodeops import Order, PodRef
from vllmsnapshot.agent.restore import RestoreRequest, clear, restore
from vllmsnapshot.agent.store import Store
from vllmsnapshot.api.constants import Reason
from vllmsnapshot_child.protocol import Oracle

PREFIX = prefix()
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(PREFIX is None, reason="no CRIU: set VLLMSNAPSHOT_CRIU_PREFIX"),
]


@pytest.fixture
def criu() -> Criu:
    assert PREFIX is not None
    return Criu(prefix=PREFIX)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.recover()
    return made


@contextlib.contextmanager
def source(criu: Criu, megabytes: int = 20, trouble: str = "", *, uid: int = 0) -> Iterator[Bare]:
    """A container whose app is up, with high PIDs."""
    # Another user cannot reach an interpreter below root's home.
    with Bare(app(megabytes, trouble, python="/usr/bin/python3" if uid else sys.executable), uid=uid) as bare:
        criu.raise_pids(bare.container, 999)
        bare.go()
        bare.expect("up")
        yield bare


def take(bare: Bare, store: Store, criu: Criu, **options: object) -> CaptureResult:
    request = CaptureRequest(**{"content": "c1", "timeout_s": 60.0, **options})  # type: ignore[arg-type]
    return capture(bare.container, request, store, criu, Cpu())


def put_back(bare: Bare, store: Store, criu: Criu, timeout_s: float = 60.0) -> dict[str, float]:
    return dict(restore(bare.container, RestoreRequest(content="c1", timeout_s=timeout_s), store, criu, Cpu()).phases)


def test_one_capture_restores_many_times_at_once(criu: Criu, store: Store) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(source(criu, 100))
        before = first.ask()
        result = take(first, store, criu)
        print("capture", dict(result.phases), result.manifest.disk_bytes)
        after = first.ask()
        assert after == {**before, "counter": before["counter"] + 1}, "the captured tree goes on as if nothing had been"
        assert not [n for n in os.listdir(f"/proc/{first.container.pid}/root/dev/shm") if n.startswith("link_remap")]
        copies = [stack.enter_context(Bare()) for _ in range(3)]
        for copy in copies:
            print("restore", put_back(copy, store, criu))
        answers = [copy.ask() for copy in copies]
        assert answers == [after] * 3, "memory, files, child and socket are there, output goes to the copy's own pipe"
        assert first.ask()["counter"] == after["counter"] + 1, "the copies share nothing with the source"
        for copy in copies:
            tree = {p.ns_pid for p in copy.container.descendants()}
            assert tree == set(result.manifest.pids)
            for cgroup in copy.cgroups:
                inside = set(map(int, (cgroup / "cgroup.procs").read_text().split()))
                assert {p.pid for p in copy.container.descendants()} <= inside, "in the container's cgroup"


def test_clones_draw_alike_until_they_get_fresh_entropy(criu: Criu, store: Store) -> None:
    """In every process, and from everything that draws in user space: numbers, keys, names of files and semaphores, time-based ids."""
    with source(criu) as first, contextlib.ExitStack() as stack:
        first.ask("draw")  # every generator has its state now
        take(first, store, criu)
        trees = [first, *(stack.enter_context(Bare()) for _ in range(2))]
        for copy in trees[1:]:
            put_back(copy, store, criu)
        before = [tree.ask("draw") for tree in trees]
        assert before[1:] == before[:1] * 2, "what this test is about: without anything done they are the same"
        after = [tree.ask("renew") for tree in trees]
        for kind in after[0]["parent"]:
            drawn = [tree[process][kind] for tree in after for process in ("parent", "child")]
            assert len(set(drawn)) == len(drawn), kind


def test_a_captured_tree_can_be_captured_and_restored_again(criu: Criu, store: Store) -> None:
    """Also from a restored one; and one container takes several restores in turn."""
    with source(criu) as first:
        before = first.ask()
        take(first, store, criu)
    with Bare() as second, Bare() as third:
        put_back(second, store, criu)
        assert second.ask()["pattern"] == before["pattern"]
        take(second, store, criu)
        counter = second.ask()["counter"]
        put_back(third, store, criu)
        assert third.ask()["counter"] == counter
        assert third.ask()["counter"] == counter + 1
        clear(third.container)
        assert third.container.processes() == []
        put_back(third, store, criu)
        assert third.ask()["counter"] == counter


@pytest.mark.parametrize(
    ("trouble", "reason", "words"),
    [
        ("listen", Reason.PREFLIGHT_INET_SOCKET, "TCP socket that listens on 127.0.0.1"),
        ("udp", Reason.PREFLIGHT_INET_SOCKET, "UDP socket that is bound to 0.0.0.0"),
        ("session", Reason.PREFLIGHT_SESSION, "is in session"),
        ("orphan", Reason.PREFLIGHT_SESSION, "is no descendant of the engine"),
    ],
)
def test_preflight_refuses_what_cannot_travel(criu: Criu, store: Store, trouble: str, reason: str, words: str) -> None:
    with source(criu, 1, trouble) as bare:
        released: list[bool] = []
        with pytest.raises(CaptureError) as error:
            capture(
                bare.container,
                CaptureRequest(content="c1", timeout_s=60),
                store,
                criu,
                Cpu(),
                on_resumed=lambda: released.append(True),
            )
        assert error.value.reason == reason
        assert words in error.value.message
        assert released == [True], "the server is released although nothing was captured"
        assert store.read().manifests == []
        assert list(store.tmp_dir.iterdir()) == []
        assert bare.ask()["echo"] == "hello"


@pytest.mark.parametrize(("trouble", "options"), [("unbound", {}), ("listen", {"allow_loopback_listeners": True})])
def test_sockets_that_name_no_address_of_the_pod_travel(criu: Criu, store: Store, trouble: str, options: dict[str, bool]) -> None:
    with source(criu, 1, trouble) as bare, Bare() as copy:
        take(bare, store, criu, **options)
        put_back(copy, store, criu)
        assert copy.ask()["echo"] == "hello"


def test_limits_of_size_are_checked_before_anything_is_written(criu: Criu, store: Store) -> None:
    with source(criu, 20) as bare:
        with pytest.raises(CaptureError) as error:
            take(bare, store, criu, max_bytes=10 << 20)
        assert error.value.reason == Reason.PREFLIGHT_SIZE
        assert bare.ask()["echo"] == "hello"


def test_a_dump_that_takes_too_long_is_cut_off_and_the_tree_goes_on(criu: Criu, store: Store) -> None:
    with source(criu, 300) as bare:
        before = bare.ask()
        for share in (0.2, 0.4, 0.6):
            # Cut off in the middle of the dump: where exactly differs from machine to machine, the outcome must not.
            with contextlib.suppress(CaptureError):
                take(bare, store, criu, timeout_s=share)
            after = bare.ask()
            assert after["pattern"] == before["pattern"]
        assert not [n for n in os.listdir(f"/proc/{bare.container.pid}/root/dev/shm") if n.startswith("link_remap")]
        assert list(store.tmp_dir.iterdir()) == []
        take(bare, store, criu, content="c2")


def test_a_disk_that_is_full_anywhere_in_a_capture(criu: Criu, tmp_path: Path) -> None:
    """CRIU's own writes among the rest. Nobody asks for room beforehand, as if others had filled the disk in the meantime."""
    megabytes = 20

    def every(disk: Disk) -> None:
        store = Store(disk.path)
        store.recover()
        with source(criu, megabytes) as bare:

            def take_it() -> CaptureResult:
                request = CaptureRequest(content="c1", timeout_s=60.0)
                return capture(
                    bare.container, request, store, criu, Cpu(), room=lambda _: None, on_resumed=lambda: released.append(True)
                )

            released: list[bool] = []
            before, empty = bare.ask(), disk.used()
            result = take_it()
            needed = disk.used() - empty
            store.delete("c1")
            assert disk.used() == empty
            for share in (0.0, 0.01, 0.1, 0.5, 0.9, 0.99):
                released.clear()
                disk.resize(empty + int(needed * share))
                with pytest.raises(StoreError) as error:
                    take_it()
                assert error.value.reason == Reason.INSUFFICIENT_DISK, f"{share}: {error.value.message}"
                assert released == [True], "it serves on"
                assert bare.ask()["pattern"] == before["pattern"]
                assert store.names() == []
                assert list(store.tmp_dir.iterdir()) == []
                assert disk.used() == empty
                assert not [n for n in os.listdir(f"/proc/{bare.container.pid}/root/dev/shm") if n.startswith("link_remap")]
            disk.resize(16 * result.manifest.disk_bytes)
            counter = bare.ask()["counter"]
            take_it()
            with Bare() as copy:
                put_back(copy, store, criu)
                assert copy.ask()["counter"] == counter + 1

    on_a_disk(tmp_path / "disk", 1 << 30, every)


def test_what_an_interrupted_capture_leaves_is_undone(criu: Criu, store: Store, tmp_path: Path) -> None:
    """The agent dies between dump and copy; the next one calls `resume`."""
    with source(criu) as bare:
        root = bare.container.descendants()[0]
        with store.work_dir() as images, store.work_dir() as work:
            criu.dump(bare.container, root.ns_pid, images, work, timeout_s=60)
        shm = Path(f"/proc/{bare.container.pid}/root/dev/shm")
        assert [n for n in os.listdir(shm) if n.startswith("link_remap")]
        assert {p.state for p in bare.container.descendants()} == {"T"}
        resume(bare.container)
        assert not [n for n in os.listdir(shm) if n.startswith("link_remap")]
        assert bare.ask()["echo"] == "hello"


def test_damaged_files_are_found_before_criu_sees_them(criu: Criu, store: Store) -> None:
    with source(criu) as bare, Bare() as copy:
        take(bare, store, criu)
        pages = max((store.artifacts_dir / "c1/images").glob("pages-*.img"), key=lambda p: p.stat().st_size)
        whole = pages.read_bytes()
        for damaged, words in ((whole[:-8192], "bytes instead of"), (whole[:-1] + bytes([whole[-1] ^ 1]), "has changed")):
            pages.write_bytes(damaged)
            with pytest.raises(StoreError) as error:
                put_back(copy, store, criu)
            assert error.value.reason == Reason.ARTIFACT_CORRUPT
            assert pages.name in error.value.message
            assert words in error.value.message
        pages.unlink()
        with pytest.raises(StoreError, match="No such file"):
            put_back(copy, store, criu)
        pages.write_bytes(whole)
        put_back(copy, store, criu)
        assert copy.ask()["echo"] == "hello"


def test_a_restore_that_never_ends_is_cut_off_and_leaves_nothing(
    criu: Criu, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU spins on a short pages file (were it not for the check): half-made processes hold the PIDs."""
    with source(criu) as bare, Bare() as copy:
        take(bare, store, criu)
        pages = max((store.artifacts_dir / "c1/images").glob("pages-*.img"), key=lambda p: p.stat().st_size)
        whole = pages.read_bytes()
        pages.write_bytes(whole[: len(whole) // 2 & ~4095])
        monkeypatch.setattr("vllmsnapshot.agent.store.Artifact.verify", lambda self: 0)
        with pytest.raises(RestoreError) as error:
            put_back(copy, store, criu, timeout_s=5)
        assert error.value.reason == Reason.RESTORE_TIMEOUT
        assert copy.container.processes() == []
        pages.write_bytes(whole)
        put_back(copy, store, criu)
        assert copy.ask()["echo"] == "hello"


def test_a_failed_restore_says_what_criu_said_and_leaves_nothing(
    criu: Criu, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with source(criu) as bare, Bare() as copy:
        take(bare, store, criu)
        monkeypatch.setattr("vllmsnapshot.agent.identity.compare_files", lambda *_: [])
        (store.artifacts_dir / "c1/upper/var/lib/bare/state").unlink()
        monkeypatch.setattr("vllmsnapshot.agent.store.Artifact.verify", lambda self: 0)
        with pytest.raises(RestoreError) as error:
            put_back(copy, store, criu)
        assert error.value.reason == Reason.RESTORE_FAILED
        assert "var/lib/bare/state" in error.value.message
        assert copy.container.processes() == []


def test_a_file_that_differs_is_named(criu: Criu, store: Store) -> None:
    with source(criu) as bare, Bare() as copy:
        result = take(bare, store, criu)
        assert result.manifest.staged == {"shm": "/dev/shm", "scratch": "/tmp", "upper": "/"}
        library = next(f.path for f in result.manifest.mapped if f.path.endswith(".so") or ".so." in f.path)
        # Replaced in the container's own layer, as a rebuilt image would have it.
        inside = Path(f"/proc/{copy.container.pid}/root") / library.lstrip("/")
        with inside.open("ab") as f:
            f.write(b"x")
        with pytest.raises(RestoreError) as error:
            put_back(copy, store, criu)
        assert error.value.reason == Reason.IDENTITY_MISMATCH
        assert library in error.value.message


def test_memory_is_admitted_before_anything_starts(criu: Criu, store: Store) -> None:
    with source(criu, 60) as bare, Bare(memory_limit=80 << 20) as small:
        take(bare, store, criu)
        with pytest.raises(RestoreError) as error:
            put_back(small, store, criu)
        assert error.value.reason == Reason.INSUFFICIENT_MEMORY
        assert small.container.processes() == []


def test_a_pid_that_somebody_has_is_named_and_left_alone(criu: Criu, store: Store) -> None:
    """A shell from outside (kubectl exec) got a PID of the tree."""
    with source(criu) as bare, Bare() as copy:
        result = take(bare, store, criu)
        wanted = result.manifest.root_pid
        criu.raise_pids(copy.container, wanted - 1)
        command = ["nsenter", "--target", str(copy.container.pid), "--pid", "--", "sh", "-c", "echo $$; exec sleep 3600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
            try:
                assert shell.stdout is not None
                assert int(shell.stdout.readline()) == wanted
                with pytest.raises(RestoreError) as error:
                    put_back(copy, store, criu)
                assert error.value.reason == Reason.RESTORE_FAILED
                assert f"PID {wanted} is taken by" in error.value.message
                assert shell.poll() is None, "it is nobody's to kill"
            finally:
                # The child of nsenter: the kernel does not pass the signal on.
                for process in copy.container.processes():
                    os.kill(process.pid, signal.SIGKILL)
                shell.wait(60)
        put_back(copy, store, criu)
        assert copy.ask()["echo"] == "hello"


def test_files_of_the_container_do_not_steer_criu(criu: Criu, store: Store, tmp_path: Path) -> None:
    """What a hostile image could bring: a preloaded library, CRIU's configuration and plugins."""
    with source(criu) as bare, Bare() as copy:
        for container in (bare, copy):
            root = Path(f"/proc/{container.container.pid}/root")
            (root / "etc/criu").mkdir(parents=True, exist_ok=True)
            (root / "etc/criu/default.conf").write_text("no-such-option\n")
            (root / "usr/lib/criu").mkdir(parents=True, exist_ok=True)
            (root / "usr/lib/criu/evil.so").write_text("no library")
            # The loader complains aloud about a preloaded library that it cannot load: in CRIU's log, if it looked.
            (root / "etc/ld.so.preload").write_text("/evil.so\n")
        released: list[str] = []
        root_pid = bare.container.descendants()[0].ns_pid
        with store.work_dir() as images, store.work_dir() as work:
            log = criu.dump(bare.container, root_pid, images, work, timeout_s=60).log
        resume(bare.container)
        assert "evil" not in log
        assert "preload" not in log
        assert released == []
        take(bare, store, criu)
        put_back(copy, store, criu)
        assert copy.ask()["echo"] == "hello"


def test_the_container_is_found_by_pod_and_control_volume(tmp_path: Path) -> None:
    with Bare() as one, Bare() as other:
        found = find(one.uid, one.control)
        assert found is not None
        with found:
            assert found.pid == one.container.pid
            assert found.alive()
        assert find(one.uid, other.control) is None, "another pod's volume"
        assert find(one.uid, tmp_path) is None, "a directory that the container has not"
        assert find(one.uid[:-1], one.control) is None, "part of a UID"
        os.kill(one.container.pid, signal.SIGKILL)
        assert wait_dead([one.container.pidfd], 60)
        assert not one.container.alive()
        with pytest.raises(ProcessLookupError):
            one.container.processes()
        assert find(one.uid, one.control) is None


@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no interpreter for all users")
def test_a_tree_of_another_user(criu: Criu, store: Store) -> None:
    with source(criu, 5, uid=1000) as bare, Bare() as copy:
        before = bare.ask()
        if not has_capability(CAP_SYS_RESOURCE):
            with pytest.raises(CaptureError, match=r"runs as user 1000: the agent needs CAP_SYS_RESOURCE"):
                take(bare, store, criu)
            return
        take(bare, store, criu)
        put_back(copy, store, criu)
        assert copy.ask()["pattern"] == before["pattern"]
        assert {p.uid for p in copy.container.descendants()} == {1000}
        assert os.stat(f"/proc/{copy.container.pid}/root/var/lib/bare/state").st_uid == 1000


def test_the_container_may_end_during_a_capture(criu: Criu, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with source(criu) as bare:
        dump = Criu.dump

        def dump_then_die(self: Criu, *args: Any, **options: Any) -> Outcome:
            outcome = dump(self, *args, **options)
            os.kill(bare.container.pid, signal.SIGKILL)
            assert wait_dead([bare.container.pidfd], 60)
            return outcome

        monkeypatch.setattr(Criu, "dump", dump_then_die)
        with pytest.raises(CaptureError) as error:
            take(bare, store, criu)
        assert error.value.reason == Reason.SOURCE_GONE
        assert store.read().manifests == []
        assert list(store.tmp_dir.iterdir()) == []


def test_an_agent_killed_in_a_restore_leaves_what_the_next_one_can_clear(criu: Criu, store: Store) -> None:
    with source(criu) as bare, Bare() as copy:
        take(bare, store, criu)
        pages = max((store.artifacts_dir / "c1/images").glob("pages-*.img"), key=lambda p: p.stat().st_size)
        whole = pages.read_bytes()
        pages.write_bytes(whole[: len(whole) // 2 & ~4095])
        script = f"""
from pathlib import Path
from vllmsnapshot.agent import accelerator, containers, criu, restore, store
store.Artifact.verify = lambda self: 0
made = store.Store(Path({str(store.root)!r}))
container = containers.find({copy.uid!r}, Path({str(copy.control)!r}))
restore.restore(container, restore.RestoreRequest(content="c1", timeout_s=60), made, criu.Criu(prefix=Path({str(criu.prefix)!r})),
    accelerator.Cpu())
"""
        agent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        try:
            # CRIU spins on the short file now, with the root of the tree half made.
            while not any(p.ns_pid == 1000 for p in copy.container.processes()):
                assert agent.poll() is None, "the restore ended"
                os.sched_yield()
        finally:
            agent.kill()
            agent.wait()
        store.recover()
        clear(copy.container)
        assert copy.container.descendants() == []
        pages.write_bytes(whole)
        put_back(copy, store, criu)
        assert copy.ask()["echo"] == "hello"


def test_an_agent_killed_in_a_dump_leaves_the_tree_alive(criu: Criu, store: Store) -> None:
    """CRIU is not killed with it, but made to let go: a process that was in the middle of injected code would die."""
    with source(criu, 300) as bare:
        before = bare.ask()
        script = f"""
from pathlib import Path
from vllmsnapshot.agent import accelerator, capture, containers, criu, store
made = store.Store(Path({str(store.root)!r}))
container = containers.find({bare.uid!r}, Path({str(bare.control)!r}))
capture.capture(container, capture.CaptureRequest(content="c1", timeout_s=60), made, criu.Criu(prefix=Path({str(criu.prefix)!r})),
    accelerator.Cpu())
"""
        for traced in (0, 1, 2, 3):
            agent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            try:
                while sum(p.traced for p in bare.container.descendants()) < traced or not criu_runs(bare):
                    assert agent.poll() is None, "the capture ended"
            finally:
                agent.kill()
                agent.wait()
            while criu_runs(bare):
                os.sched_yield()
            resume(bare.container)
            assert bare.ask()["pattern"] == before["pattern"]
        store.recover()
        take(bare, store, criu)


def criu_runs(bare: Bare) -> bool:
    """Whether a process of the container's namespace is CRIU."""
    return any(is_criu(bare.container.proc, p) for p in bare.container.processes())


def test_an_artifact_is_not_deleted_under_a_restore(criu: Criu, store: Store) -> None:
    with source(criu, 1) as bare, Bare() as copy:
        take(bare, store, criu)
        with store.open("c1"):
            with pytest.raises(StoreError, match="being read"):
                store.delete("c1", timeout_s=0)
            put_back(copy, store, criu)
        assert store.delete("c1")
        with pytest.raises(StoreError) as error:
            put_back(copy, store, criu)
        assert error.value.reason == Reason.ARTIFACT_MISSING
        assert copy.ask()["echo"] == "hello", "a refused restore touches nothing that was there"


def test_a_volume_below_scratch_does_not_travel(criu: Criu, store: Store) -> None:
    with source(criu, 1) as bare, Bare() as copy:
        (Path(f"/proc/{bare.container.pid}/root") / "tmp/volume/model").write_bytes(b"x" * (50 << 20))
        result = take(bare, store, criu, max_bytes=50 << 20)
        assert "scratch/lock" in result.manifest.files
        assert not [n for n in result.manifest.files if "volume" in n]
        put_back(copy, store, criu)
        assert copy.ask()["echo"] == "hello"


def test_node_operations_as_the_agent_calls_them(criu: Criu, tmp_path: Path) -> None:
    """The whole boundary between deciding and doing, on a kubelet directory that looks like one."""
    kubelet = tmp_path / "kubelet"
    (kubelet / "pods").mkdir(parents=True)
    ops = LocalOps(
        Config(node_name="n", kubelet_dir=str(kubelet), store_dir=str(tmp_path / "store"), criu_prefix=str(criu.prefix))
    )

    def pod(bare: Bare) -> PodRef:
        volumes = kubelet / "pods" / bare.uid / "volumes"
        volumes.mkdir(parents=True, exist_ok=True)
        if not (volumes / "kubernetes.io~empty-dir").exists():
            (volumes / "kubernetes.io~empty-dir").symlink_to(bare.base)
        return PodRef(namespace="ns", name="pod", uid=bare.uid)

    health = ops.doctor()
    assert health.capable, health.message
    assert health.environment["kernelRelease"]
    oracle = Oracle(token_ids=[1], text=" Paris", sampled_token_logprob=-0.1)
    order = Order(content="c1", content_uid="u1", identity="i1", snapshot_uid="s1", timeout_s=60, oracle=oracle)
    with Bare(app(5)) as first, Bare() as second:
        ops.raise_pids(pod(first))
        first.go()
        first.expect("up")
        before = first.ask()
        assert before["pid"] >= 1000
        resumed: list[bool] = []
        stored = ops.capture(pod(first), order, lambda _: None, lambda: resumed.append(True))
        assert resumed == [True]
        assert (stored.content_uid, stored.oracle, stored.foreign) == ("u1", oracle, False)
        assert ops.artifact("c1") == stored
        assert ops.shelf().artifacts == [stored]
        assert ops.artifact("c2") is None
        revived = ops.restore(pod(second), "c1", 60, lambda: None)
        assert revived.pid == before["pid"]
        assert second.ask()["pattern"] == before["pattern"]
        ops.resume(pod(second))
        ops.clear(pod(second))
        assert second.container.processes() == []
        ops.end(pod(second), 3600.0)
        assert second.container.alive(), "it is not that old"
        ops.end(pod(second), 0.0)
        assert wait_dead([second.container.pidfd], 60)
        with pytest.raises(RestoreError, match="has no running"):
            ops.restore(pod(second), "c1", 60, lambda: None)
        ops.delete_artifact("c1")
        ops.delete_artifact("c1")
        assert ops.shelf().artifacts == []


def test_changed_files_of_the_image_travel_and_mounted_ones_do_not(criu: Criu, store: Store) -> None:
    with source(criu, 1) as bare, Bare() as copy:
        theirs, mine = (Path(f"/proc/{b.container.pid}/root/etc") for b in (bare, copy))
        # One that a layer below has, too; in an overlay it has another device number than the directory it is in.
        (theirs / "debian_version").write_text("changed")
        (theirs / "hostname").write_text("of the captured pod")
        before = (mine / "hostname").read_text()
        result = take(bare, store, criu)
        assert "upper/etc/debian_version" in result.manifest.files
        assert "upper/etc/hostname" not in result.manifest.files
        put_back(copy, store, criu)
        assert (mine / "debian_version").read_text() == "changed"
        assert (mine / "hostname").read_text() == before
