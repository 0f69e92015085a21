"""What must be the same where an image is restored: kernel, CPU, CRIU, the container's image, and the files its memory is made of.

CRIU writes into an image only memory that differs from files; code comes from disk again. One byte changed at equal size goes
unnoticed by CRIU, so sizes and times are compared here, and a difference is named.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..environment import BOOT, CPU, CPU_FLAGS, CRIU, KERNEL, LAYERS, MACHINE, differences
from . import namespaces
from .containers import Container, Mount, Process, lines, read_process

DIGEST_LIMIT: Final = 64 << 20
"""Files outside the image's layers up to this size (bytes) are digested whole; of larger ones evenly spaced samples are."""
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 64 << 10

MODEL_VARIABLE: Final = "VLLMSNAPSHOT_MODEL"
MODEL_FILES: Final = 4096
"""Files of a model directory that are looked at."""


@dataclass(frozen=True, kw_only=True)
class FileFact:
    """A file that the tree has mapped or open, as the container sees it. `digest` only where layers cannot vouch for it."""

    path: str
    size: int
    mtime_ns: int
    image: bool
    digest: str | None = None


def node_facts(
    criu_version: str, criu_program: Path, *, accelerator: Mapping[str, str] | None = None, proc: Path = Path("/proc")
) -> dict[str, str]:
    """Facts of this node. Raises OSError."""
    model, flags = cpu(proc)
    with open(criu_program, "rb") as f:
        criu_digest = hashlib.file_digest(f, "sha256").hexdigest()
    return {
        KERNEL: platform.release(),
        MACHINE: platform.machine(),
        CPU: model,
        CPU_FLAGS: " ".join(flags),
        CRIU: f"{criu_version} sha256:{criu_digest[:16]}",
        BOOT: (proc / "sys/kernel/random/boot_id").read_text().strip(),
        **(accelerator or {}),
    }


def cpu(proc: Path = Path("/proc")) -> tuple[str, list[str]]:
    """Model name and sorted flags that every CPU has."""
    model, common = "", None
    for line in lines((proc / "cpuinfo").read_text(errors="replace")):
        name, _, value = line.partition(":")
        if name.strip() == "model name" and not model:
            model = value.strip()
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            common = flags if common is None else common & flags
    return model or platform.machine(), sorted(common or ())


def runtime_root(container: Container) -> int | None:
    """A descriptor of the file system as the container runtime sees it, where overlay directories have their names; or None.

    They are no paths of the agent's. The runtime's shim is an ancestor of PID 1: the first one with other mounts than its own.
    """
    mine = container.namespace("mnt")
    pid = container.init.ppid
    with contextlib.suppress(OSError, ValueError):
        while pid > 0:
            base = container.proc / str(pid)
            if os.readlink(base / "ns/mnt") != mine:
                return os.open(base / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            pid = read_process(container.proc, pid).ppid
    return None


def layers(mounts: Iterable[Mount], root: int | None = None) -> str:
    """A word for the read-only layers of the container's root file system; empty if it is no overlay.

    Not the image digest of the pod's status: that arrives seconds after the container, and the artifact stays on this node
    anyhow. With `root` (see `runtime_root`) inode and change time of each layer's directory count too, because a containerd that
    was wiped gives the same names to other layers.
    """
    lower = [m.options.get("lowerdir", "") for m in mounts if m.point == "/" and m.kind == "overlay"]
    if not lower:
        return ""
    word = hashlib.sha256(lower[-1].encode())
    for path in lower[-1].split(":") if root is not None else ():
        if path.startswith("/"):
            assert root is not None
            with contextlib.suppress(OSError):
                info = namespaces.stat_in_root(root, path)
                word.update(f"{info.st_ino} {info.st_ctime_ns}\n".encode())
    return f"sha256:{word.hexdigest()[:16]}"


def image_layers(container: Container) -> str:
    """`layers` of a running container. Raises OSError."""
    root = runtime_root(container)
    try:
        return layers(container.mounts(), root)
    finally:
        if root is not None:
            os.close(root)


def compare_node(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Every difference that forbids a restore, each naming its field."""
    return [str(item) for item in differences(recorded, here)]


# --- files -----------------------------------------------------------------------------------------------------------

_MAPPED: Final = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ (\d+) +(/.*)$")


def mapped_paths(maps: str) -> set[str]:
    """Paths in the text of /proc/PID/maps, without deleted files and those that are none (memfd, SysV, anonymous)."""
    paths = set()
    for line in lines(maps):
        match = _MAPPED.match(line)
        if (
            match
            and match[1] != "0"
            and not match[2].endswith(" (deleted)")
            and not match[2].startswith(("/memfd:", "/SYSV", "//"))
        ):
            paths.add(match[2])
    return paths


def file_facts(
    container: Container,
    processes: Iterable[Process],
    *,
    staged: Collection[str],
    upper: Collection[str] = (),
    mounts: Sequence[Mount],
) -> list[FileFact]:
    """Every regular file that the processes have mapped or open, and those of the model, but those that travel with the image.

    The model's are neither mapped nor open any more, but their content lives on in the image: weights that vLLM has packed for a
    CPU kernel are not read again.

    `staged`: directories (paths in the container) that travel; `upper`: files of the root file system that do, without leading
    slash. Cheap: no file is read. A file that cannot be found is left to CRIU, which names it. Raises OSError.
    """
    paths: set[str] = set()
    for process in processes:
        base = container.proc / str(process.pid)
        with open(base / "maps", errors="surrogateescape") as f:
            paths |= mapped_paths(f.read())
        for name in os.listdir(base / "fd"):
            try:
                link = os.readlink(base / "fd" / name)
            except OSError:
                continue
            if link.startswith("/") and not link.endswith(" (deleted)") and not link.startswith(("/memfd:", "/dev/", "/proc/")):
                paths.add(link)
    facts = []
    with namespaces.opened(container.open_root()) as root:
        paths |= set(model_files(container, root))
        for path in sorted(paths):
            on = mount_of(path, mounts)
            # A volume mounted below a staged directory does not travel.
            if any(path.startswith(f"{s}/") and len(on) <= len(s) for s in staged) or path.lstrip("/") in upper:
                continue
            try:
                info = namespaces.stat_in_root(root, path)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode):
                facts.append(FileFact(path=path, size=info.st_size, mtime_ns=info.st_mtime_ns, image=on == "/"))
    return facts


def model_files(container: Container, root: int) -> list[str]:
    """Paths of the files of the model, where it is a directory of the container (by the environment of PID 1)."""
    directory = ""
    with contextlib.suppress(OSError):
        for item in container.text("environ").split("\0"):
            name, _, value = item.partition("=")
            if name == MODEL_VARIABLE and value.startswith("/"):
                directory = value.rstrip("/")
    if not directory:
        return []
    try:
        fd = namespaces.open_in_root(root, directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []  # no directory, or gone: vLLM will say so
    with namespaces.opened(fd):
        return [f"{directory}/{name}" for name in sorted(os.listdir(fd))[:MODEL_FILES]]


def mount_of(path: str, mounts: Iterable[Mount]) -> str:
    """The mount point that a path lies on."""
    best = "/"
    for mount in mounts:
        if (path == mount.point or path.startswith(mount.point.rstrip("/") + "/")) and len(mount.point) > len(best):
            best = mount.point
    return best


def with_digests(container: Container, facts: Iterable[FileFact]) -> list[FileFact]:
    """The facts with digests of the files that are no part of the image."""
    done = []
    with namespaces.opened(container.open_root()) as root:
        for fact in facts:
            digest = None if fact.image else _digest(root, fact.path)
            done.append(FileFact(path=fact.path, size=fact.size, mtime_ns=fact.mtime_ns, image=fact.image, digest=digest))
    return done


def _digest(root: int, path: str) -> str | None:
    try:
        fd = namespaces.open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as f:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return None
        if info.st_size <= DIGEST_LIMIT:
            return hashlib.file_digest(f, "sha256").hexdigest()
        return _sampled(fd, info.st_size)


def _sampled(fd: int, size: int) -> str:
    """A digest of evenly spaced samples, the first and the last bytes among them.

    Other weights differ everywhere, so a few megabytes tell them apart; reading all of a large model at every restore would take
    longer than the restore. It is no protection against somebody who changes a file on purpose between the samples.
    """
    word = hashlib.sha256(f"sampled {size}".encode())
    for index in range(SAMPLES):
        word.update(os.pread(fd, SAMPLE_BYTES, (size - SAMPLE_BYTES) * index // (SAMPLES - 1)))
    return f"sampled:{word.hexdigest()}"


def compare_image(recorded: Mapping[str, str], container: Container) -> list[str]:
    """The difference, if the container's image is not the captured one.

    The files compared below are those that memory is mapped from. The code of an interpreter is not among them: it was read, and
    lives on in the memory of the image. Only the layers tell that another image stands behind the same tag.
    """
    then, now = recorded.get(LAYERS, ""), image_layers(container)
    return [] if then == now else [f"{LAYERS}: {now or 'none'} instead of {then or 'none'} (another image, or pulled again)"]


def compare_files(recorded: Iterable[FileFact], container: Container) -> list[str]:
    """Every recorded file that is not the same in this container, each named. One `stat` a file.

    Of a file of the image, size and time decide: both come from the layer's archive. A file of a volume may have another time if
    its digest is the same.
    """
    found: list[str] = []
    with namespaces.opened(container.open_root()) as root:
        for fact in recorded:
            try:
                info = namespaces.stat_in_root(root, fact.path)
            except OSError as e:
                found.append(f"file {fact.path}: {e.strerror}")
                continue
            if not stat.S_ISREG(info.st_mode):
                found.append(f"file {fact.path}: not a regular file")
            elif info.st_size != fact.size:
                found.append(f"file {fact.path}: {info.st_size} bytes instead of {fact.size}")
            elif fact.digest is not None:
                if _digest(root, fact.path) != fact.digest:
                    found.append(f"file {fact.path}: other content")
            elif info.st_mtime_ns != fact.mtime_ns:
                found.append(f"file {fact.path}: changed at {info.st_mtime_ns} instead of {fact.mtime_ns} (ns)")
    return found
