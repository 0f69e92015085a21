"""What must be equal where an image is restored."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmsnapshot import environment
from vllmsnapshot.agent import identity
from vllmsnapshot.agent.containers import Container, Mount, parse_mountinfo
from vllmsnapshot.agent.identity import compare_node
from vllmsnapshot.api import constants as c

HERE = {
    environment.KERNEL: "6.1",
    environment.MACHINE: "x86_64",
    environment.CRIU: "4.2.1 a",
    environment.BOOT: "b1",
    environment.CPU_FLAGS: "sse",
}


def test_equal_nodes() -> None:
    assert compare_node(HERE, HERE) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({environment.KERNEL: "6.2"}, "kernelRelease: 6.2 instead of 6.1"),
        ({environment.CRIU: "4.2.1 b"}, "criu: 4.2.1 b instead of 4.2.1 a"),
        ({"page": "64K"}, "page: 64K instead of none"),
    ],
)
def test_a_difference_is_named(change: dict[str, str], words: str) -> None:
    assert compare_node(HERE, {**HERE, **change}) == [words]


def test_boot_and_more_cpu_flags_do_not_matter() -> None:
    there = {**HERE, environment.BOOT: "b2", environment.CPU_FLAGS: "avx sse", environment.CPU: "another"}
    assert compare_node(HERE, there) == []


def test_missing_cpu_flags_are_named() -> None:
    found = compare_node({**HERE, environment.CPU_FLAGS: "amx_tile avx512f sse"}, HERE)
    assert found == ["cpuFlags: none of them instead of amx_tile avx512f"]
    many = " ".join(f"f{n:02}" for n in range(20))
    assert compare_node({**HERE, environment.CPU_FLAGS: many}, HERE) == [
        "cpuFlags: none of them instead of f00 f01 f02 f03 f04 f05 f06 f07 ..."
    ]


def test_a_side_that_does_not_tell_its_flags_says_nothing_of_them() -> None:
    silent = {k: x for k, x in HERE.items() if k != environment.CPU_FLAGS}
    assert compare_node(HERE, silent) == compare_node(silent, HERE) == []


def test_flags_that_only_some_cpus_have_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Big\nflags\t\t: a b c\n\nmodel name\t: Small\nflags\t\t: a b\n")
    assert identity.cpu(tmp_path) == ("Big", ["a", "b"])


def test_the_node_facts_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "criu").write_text("program")
    facts = identity.node_facts("4.2.1", tmp_path / "criu", accelerator={"gpuDriver": "1"})
    assert facts["gpuDriver"] == "1"
    assert facts[environment.CPU_FLAGS].split()
    assert all(len(v) <= c.FACT_LENGTH for v in facts.values()), "the API's limit"


def test_mapped_paths() -> None:
    maps = """
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 123                        /usr/bin/python3.11
7f0000000000-7f0000001000 r-xp 00001000 fe:00 124                        /usr/lib/with blank.so
7f0000001000-7f0000002000 rw-s 00000000 00:05 125                        /dev/shm/sem.abc (deleted)
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000003000-7f0000004000 rw-s 00000000 00:01 7                          /memfd:x (deleted)
7f0000004000-7f0000005000 rw-s 00000000 00:01 8                          /SYSV00000000 (deleted)
7f0000005000-7f0000006000 rw-s 00000000 00:01 9                          /dev/zero
7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0                          [stack]
"""
    assert identity.mapped_paths(maps) == {"/usr/bin/python3.11", "/usr/lib/with blank.so", "/dev/zero"}


def mount(point: str, kind: str = "tmpfs", **options: str) -> Mount:
    return Mount(point=point, root="/", kind=kind, device="0:1", options=options)


def test_the_mount_of_a_path() -> None:
    mounts = [mount("/"), mount("/tmp"), mount("/models"), mount("/models/a")]
    assert identity.mount_of("/usr/lib/x", mounts) == "/"
    assert identity.mount_of("/tmpfile", mounts) == "/"
    assert identity.mount_of("/models/a/b", mounts) == "/models/a"
    assert identity.mount_of("/models/ab", mounts) == "/models"


def test_layers_are_a_short_word_for_a_long_list() -> None:
    long = ":".join(f"/var/lib/containerd/snapshots/{n}/fs" for n in range(200))
    one = identity.layers([mount("/", "overlay", lowerdir=long)])
    assert len(one) < 64
    assert one == identity.layers([mount("/", "overlay", lowerdir=long), mount("/tmp")])
    assert one != identity.layers([mount("/", "overlay", lowerdir=long + ":/x")])
    assert identity.layers([mount("/", "ext4")]) == ""


def test_layers_of_the_same_name_are_told_apart_by_the_directory_itself(tmp_path: Path) -> None:
    # A containerd that was wiped counts its snapshots from 1 again.
    (tmp_path / "1/fs").mkdir(parents=True)
    root = os.open(tmp_path, os.O_PATH)
    try:
        overlay = [mount("/", "overlay", lowerdir="/1/fs")]
        first = identity.layers(overlay, root)
        assert first == identity.layers(overlay, root)
        (tmp_path / "1").rename(tmp_path / "old")
        (tmp_path / "1/fs").mkdir(parents=True)
        assert first != identity.layers(overlay, root)
    finally:
        os.close(root)


def test_mountinfo_of_both_mount_apis() -> None:
    old = r"1 2 0:42 / / rw,relatime - overlay overlay rw,lowerdir=/a:/b,upperdir=/u\040p,workdir=/w"
    new = r"1 2 0:42 / / rw,relatime shared:1 - overlay overlay rw,lowerdir+=/a,lowerdir+=/b,upperdir=/u\040p,workdir=/w"
    for text in (old, new):
        (found,) = parse_mountinfo(text.replace("\\040", "\\040"))
        assert found.options["lowerdir"] == "/a:/b"
        assert found.kind == "overlay"
    (bind,) = parse_mountinfo(r"1 2 0:42 /sub\040dir /a\040b rw - ext4 /dev/sda rw")
    assert (bind.root, bind.point) == ("/sub dir", "/a b")


@contextlib.contextmanager
def running(**environment: str) -> Iterator[Container]:
    """A process that has come so far as to answer: right after exec its environment still reads empty."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"\n"
        with Container(process.pid) as container:
            yield container
        process.stdin.close()


def of_model(directory: Path) -> list[identity.FileFact]:
    """What a capture would record of a container whose model is this directory."""
    with running(**{identity.MODEL_VARIABLE: str(directory)}) as container:
        facts = identity.file_facts(container, [], staged=[], mounts=[mount("/"), mount(str(directory))])
        return identity.with_digests(container, facts)


def differences(recorded: list[identity.FileFact]) -> list[str]:
    with running() as container:
        return identity.compare_files(recorded, container)


def test_other_weights_of_the_same_size_and_time_are_another_model(tmp_path: Path) -> None:
    # Packed weights stay in the image: a restored engine would go on with the old ones, and answer as the old model.
    large, small = tmp_path / "model.safetensors", tmp_path / "config.json"
    small.write_text("{}")
    with large.open("wb") as f:
        f.truncate(identity.DIGEST_LIMIT + 12345)
    before = large.stat()
    recorded = of_model(tmp_path)
    assert {fact.path for fact in recorded} == {str(large), str(small)}
    assert differences(recorded) == []

    with large.open("r+b") as f:
        f.seek(identity.DIGEST_LIMIT // 2)
        f.write(b"\1" * (8 << 20))
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert differences(recorded) == [f"file {large}: other content"]


def test_a_model_that_was_downloaded_again_is_the_same(tmp_path: Path) -> None:
    large = tmp_path / "model.safetensors"
    with large.open("wb") as f:
        f.truncate(identity.DIGEST_LIMIT + 1)
    recorded = of_model(tmp_path)
    os.utime(large, (1, 1))
    assert differences(recorded) == []


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    recorded = of_model(tmp_path)
    (tmp_path / "config.json").unlink()
    assert differences(recorded) == [f"file {tmp_path}/config.json: No such file or directory"]
