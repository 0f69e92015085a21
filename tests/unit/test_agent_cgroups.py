"""The container's cgroups in every layout a node may have: v1, v2, both, and with the agent in a cgroup namespace of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from vllmsnapshot.agent.containers import Container, in_pod, memory_limit
from vllmsnapshot.agent.criu import CriuError, cgroup_files, root_cgroup_files

POD = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-poduid_1.slice/cri-containerd-abc.scope"


class Node:
    """A cgroup file system as directories, and the files of /proc that tell of it."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.mounts: list[str] = []
        self.mine, self.theirs = "0::/agent\n", f"0::/{POD}\n"

    def mount(self, point: str, kind: str, options: str = "rw", root: str = "/") -> Path:
        """A hierarchy."""
        directory = self.cgroups / point
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.procs").touch()
        number = len(self.mounts) + 30
        self.mounts.append(f"{number} 1 0:{number} {root} {directory} rw - {kind} {kind} {options}")
        return directory

    def group(self, hierarchy: Path, path: str, **files: str) -> Path:
        """A cgroup in it."""
        directory = hierarchy / path
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").touch()
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(text)
        return directory

    def container(self) -> Container:
        """The container, as far as cgroups are concerned."""
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")
        (self.proc / "self/cgroup").write_text(self.mine)
        node = self

        class Fake:
            proc = node.proc

            def text(self, name: str) -> str:
                assert name == "cgroup"
                return node.theirs

        return cast(Container, Fake())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def joined(node: Node) -> list[str]:
    """Which files a restored tree would be written into, relative to the cgroup mount."""
    files = cgroup_files(node.container(), node.cgroups)
    try:
        return [str(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(node.cgroups)) for fd in files]
    finally:
        for fd in files:
            os.close(fd)


def test_v2_alone(node: Node) -> None:
    top = node.mount(".", "cgroup2")
    node.group(top, POD, memory__max=f"{1 << 30}\n")
    assert memory_limit(node.container(), node.cgroups) == 1 << 30
    assert joined(node) == [f"{POD}/cgroup.procs"]


@pytest.mark.parametrize("text", ["max\n", "", "none\n"])
def test_v2_without_a_limit(node: Node, text: str) -> None:
    top = node.mount(".", "cgroup2")
    node.group(top, POD, memory__max=text)
    assert memory_limit(node.container(), node.cgroups) is None


def test_v2_whose_limit_cannot_be_read(node: Node) -> None:
    node.group(node.mount(".", "cgroup2"), POD)
    assert memory_limit(node.container(), node.cgroups) is None


def test_v1_and_v2_side_by_side(node: Node) -> None:
    memory, cpu = node.mount("memory", "cgroup", "rw,memory"), node.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    named, unified = node.mount("systemd", "cgroup", "rw,name=systemd"), node.mount("unified", "cgroup2")
    for hierarchy in (memory, cpu, named, unified):
        node.group(hierarchy, POD, memory__limit_in_bytes=f"{2 << 30}\n", memory__max="max\n")
    node.theirs = f"4:memory:/{POD}\n3:cpu,cpuacct:/{POD}\n1:name=systemd:/{POD}\n0::/{POD}\n"
    assert memory_limit(node.container(), node.cgroups) == 2 << 30
    assert joined(node) == [f"{x}/{POD}/cgroup.procs" for x in ("memory", "cpu,cpuacct", "systemd", "unified")]


def test_v1_says_no_limit_as_the_largest_number(node: Node) -> None:
    node.group(node.mount("memory", "cgroup", "rw,memory"), POD, memory__limit_in_bytes="9223372036854771712\n")
    node.theirs = f"4:memory:/{POD}\n"
    assert memory_limit(node.container(), node.cgroups) is None


def test_a_hierarchy_that_is_shared_with_the_agent_is_left_alone(node: Node) -> None:
    node.group(node.mount(".", "cgroup2"), POD)
    node.mine = node.theirs
    assert joined(node) == []


def test_a_hierarchy_that_is_not_mounted_is_named(node: Node) -> None:
    node.mount("memory", "cgroup", "rw,memory")
    with pytest.raises(CriuError, match="hierarchy v2 is not mounted"):
        cgroup_files(node.container(), node.cgroups)


def test_a_cgroup_that_is_gone_is_named_and_nothing_stays_open(node: Node) -> None:
    memory = node.mount("memory", "cgroup", "rw,memory")
    node.group(memory, POD)
    node.mount("unified", "cgroup2")
    node.theirs = f"4:memory:/{POD}\n0::/{POD}\n"
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CriuError, match="cannot be joined"):
        cgroup_files(node.container(), node.cgroups)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mount_of_a_part_of_the_hierarchy(node: Node) -> None:
    """A node that is a container itself (kind): the mount's root is a path of the outer one."""
    top = node.mount(".", "cgroup2", root="/outer")
    node.group(top, POD, memory__max="4096\n")
    node.theirs = f"0::/outer/{POD}\n"
    assert memory_limit(node.container(), node.cgroups) == 4096
    assert joined(node) == [f"{POD}/cgroup.procs"]


def test_the_roots_that_a_dump_moves_into(node: Node) -> None:
    node.mount("memory", "cgroup", "rw,memory")
    node.mount("unified", "cgroup2")
    node.container()
    files = root_cgroup_files(node.proc, node.cgroups)
    names = [str(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(node.cgroups)) for fd in files]
    for fd in files:
        os.close(fd)
    assert names == ["memory/cgroup.procs", "unified/cgroup.procs"]


@pytest.mark.parametrize("path", [f"/{POD}", "/kubepods/burstable/poduid-1/abc"])
def test_both_drivers_name_the_pod(path: str) -> None:
    assert in_pod(f"0::{path}\n", "uid-1")
    assert not in_pod(f"0::{path}\n", "uid-11")
    assert not in_pod(f"0::{path}\n", "uid")
