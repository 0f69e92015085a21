"""Findings of the node doctor: each failure names a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllmsnapshot.agent import doctor
from vllmsnapshot.agent.criu import Criu, CriuError
from vllmsnapshot.agent.nodeops import Health

V1 = """30 1 0:25 / /host/cgroup rw - tmpfs tmpfs rw
31 30 0:26 / /host/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:27 / /host/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:28 / /host/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
34 30 0:29 / /host/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V1_INIT = "4:memory:/\n3:cpu,cpuacct:/\n1:name=systemd:/init\n0::/init\n"
V2 = "31 1 0:26 / /host/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture(autouse=True)
def writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: True)


@pytest.mark.parametrize(("mounts", "init", "words"), [(V1, V1_INIT, "v1 and v2"), (V2, "0::/\n", "v2")])
def test_cgroup_layouts(mounts: str, init: str, words: str) -> None:
    assert doctor.cgroups(mounts, init, Path("/host/cgroup")) == ("Pass", words, None)


@pytest.mark.parametrize(
    ("mounts", "init", "words"),
    [
        (V1, V1_INIT + "9:pids:/\n", "not mounted below /host/cgroup: pids"),
        (V1.replace("name=systemd", "name=other"), V1_INIT, "name=systemd"),
        (V2, V1_INIT, "memory"),
        ("", "0::/\n", "v2"),
        (V2.replace("/host/cgroup", "/sys/fs/cgroup"), "0::/\n", "v2"),
    ],
)
def test_missing_cgroups(mounts: str, init: str, words: str) -> None:
    status, message, remedy = doctor.cgroups(mounts, init, Path("/host/cgroup"))
    assert status == "Fail"
    assert words in message
    assert remedy


def test_read_only_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    status, message, _ = doctor.cgroups(V2, "0::/\n", Path("/host/cgroup"))
    assert (status, message) == ("Fail", "read-only: /host/cgroup")


@pytest.mark.parametrize(
    ("release", "status"), [("6.18.44-fc", "Pass"), ("5.11.0", "Pass"), ("5.4.0-1", "Fail"), ("odd", "Fail")]
)
def test_kernels(release: str, status: str) -> None:
    assert doctor.kernel(release)[0] == status


@pytest.mark.parametrize(
    ("mask", "status", "words"),
    [
        ("000001ffffffffff", "Pass", "all"),
        ("000001fffeffffff", "Warn", "CAP_SYS_RESOURCE"),
        ("00000000a80425fb", "Fail", "CAP_SYS_ADMIN"),
    ],
)
def test_capabilities(mask: str, status: str, words: str) -> None:
    found = doctor.capabilities(f"Name:\tx\nCapEff:\t{mask}\n")
    assert found[0] == status
    assert words in found[1]


def test_old_or_broken_criu(monkeypatch: pytest.MonkeyPatch) -> None:
    criu = Criu(prefix=Path("/nonexistent"))
    assert doctor.criu_works(criu)[0] == "Fail"
    monkeypatch.setattr(Criu, "version", lambda self: "4.1.1")
    assert doctor.criu_works(criu)[:2] == ("Fail", "CRIU 4.1.1")
    monkeypatch.setattr(Criu, "version", lambda self: "4.10.0")

    def lacking(self: Criu) -> str:
        raise CriuError("criu check: no timens", timed_out=False)

    monkeypatch.setattr(Criu, "check", lacking)
    assert doctor.criu_works(criu)[1] == "criu check: no timens"
    monkeypatch.setattr(Criu, "check", lambda self: "Looks good.")
    assert doctor.criu_works(criu) == ("Pass", "4.10.0: Looks good.", None)


def test_the_store_and_the_kubelet(tmp_path: Path) -> None:
    assert doctor.store_writable(tmp_path / "new")[0] == "Pass"
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert doctor.store_writable(tmp_path / "file")[0] == "Fail"
    assert doctor.kubelet(tmp_path)[0] == "Fail"
    (tmp_path / "pods").mkdir()
    assert doctor.kubelet(tmp_path)[0] == "Pass"


def test_memory_and_io_uring(tmp_path: Path) -> None:
    assert doctor.memory("MemTotal: 100000000 kB\nMemAvailable: 50000000 kB\n")[0] == "Pass"
    assert doctor.memory("MemTotal: 100000000 kB\nMemAvailable: 5000 kB\n")[0] == "Warn"
    assert "RuntimeDefault" in doctor.io_uring(tmp_path)[1]
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/io_uring_disabled").write_text("2\n")
    assert doctor.io_uring(tmp_path)[1] == "off"


def test_an_examination_never_raises_and_every_failure_has_a_remedy(tmp_path: Path) -> None:
    checks = doctor.examine(Criu(prefix=tmp_path), tmp_path / "store", tmp_path / "kubelet", proc=tmp_path / "no-proc")
    names = [c.name for c in checks]
    assert len(names) == len(set(names))
    assert all(c.remedy for c in checks if c.status != "Pass")
    assert "criu: " in doctor.trouble(checks)
    assert doctor.trouble(checks, gpu=True) == ""


def test_gpus_are_no_obstacle_to_replicas_without_one(tmp_path: Path) -> None:
    more = [(f"{doctor.GPU}driver", lambda: doctor.failed("too old", "install a newer one"))]
    checks = doctor.examine(Criu(prefix=tmp_path), tmp_path / "store", tmp_path / "kubelet", proc=tmp_path, more=more)
    assert "too old" not in doctor.trouble(checks)
    assert doctor.trouble(checks, gpu=True) == "gpu-driver: too old (install a newer one)"
    health = Health(capable=True, gpu=doctor.trouble(checks, gpu=True))
    assert health.obstacle(gpu=False) == ""
    assert "too old" in health.obstacle(gpu=True)
    assert Health(capable=True).obstacle(gpu=True) == ""
    assert Health(capable=False, message="no CRIU", gpu="").obstacle(gpu=True) == "no CRIU"
