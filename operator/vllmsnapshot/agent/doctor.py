"""Can this node capture and restore? One check per thing that would otherwise fail in the middle of a capture."""

from __future__ import annotations

import os
import platform
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from ..api.types import Check
from .containers import lines, parse_mountinfo
from .criu import MINIMUM, Criu, CriuError

KERNEL_MINIMUM: Final = (5, 11)
"""pidfd_getfd (5.6), openat2 (5.6), clone3 with set_tid (5.5), CAP_CHECKPOINT_RESTORE (5.9), exact memory maps of rseq (5.13 on)."""

DISK_WANTED: Final = 10 << 30
DISK_NEEDED: Final = 1 << 30

CAPABILITIES: Final = {
    "CAP_SYS_ADMIN": (21, "enter a container's namespaces"),
    "CAP_SYS_PTRACE": (19, "dump another process"),
    "CAP_NET_ADMIN": (12, "restore sockets"),
    "CAP_KILL": (5, "end a half-restored tree"),
    "CAP_SETUID": (7, "restore a process's user"),
    "CAP_SETGID": (6, "restore a process's group"),
    "CAP_CHOWN": (0, "restore the owner of a file"),
    "CAP_DAC_OVERRIDE": (1, "read a workload's files"),
    "CAP_CHECKPOINT_RESTORE": (40, "choose PIDs"),
}
CAP_SYS_RESOURCE: Final = 24

Finding = tuple[str, str, str | None]
"""Status, message, remedy."""

GPU: Final = "gpu-"
"""What the names of checks of GPUs begin with (`gpu_doctor`)."""


def failed(message: str, remedy: str) -> Finding:
    """It does not work."""
    return "Fail", message, remedy


def warned(message: str, remedy: str) -> Finding:
    """It works, but."""
    return "Warn", message, remedy


def passed(message: str) -> Finding:
    """It works."""
    return "Pass", message, None


def examine(
    criu: Criu,
    store_dir: Path,
    kubelet_dir: Path,
    *,
    proc: Path = Path("/proc"),
    more: Sequence[tuple[str, Callable[[], Finding]]] = (),
) -> list[Check]:
    """All checks, in the order in which a failure would be met, then `more`. Takes a fraction of a second; never raises."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("kernel", lambda: kernel(platform.release())),
        ("machine", lambda: machine(platform.machine())),
        ("criu", lambda: criu_works(criu)),
        ("capabilities", lambda: capabilities((proc / "self/status").read_text())),
        ("pid-namespace", lambda: host_pids(proc)),
        ("last-pid", lambda: last_pid(proc)),
        ("cgroups", lambda: cgroups((proc / "self/mountinfo").read_text(), (proc / "1/cgroup").read_text(), criu.cgroup_root)),
        ("store", lambda: store_writable(store_dir)),
        ("disk", lambda: disk(store_dir)),
        ("kubelet-dir", lambda: kubelet(kubelet_dir)),
        ("io-uring", lambda: io_uring(proc)),
        ("memory", lambda: memory((proc / "meminfo").read_text())),
        *more,
    ]
    done = []
    for name, check in checks:
        try:
            status, message, remedy = check()
        except Exception as e:
            status, message, remedy = failed(f"cannot be examined: {type(e).__name__}: {e}", "see the agent's log")
        done.append(Check.model_validate({"name": name, "status": status, "message": message[:1000], "remedy": remedy}))
    return done


def trouble(checks: Iterable[Check], *, gpu: bool = False) -> str:
    """What failed, with the remedies; empty if nothing did. Either of the GPUs, or of all else: neither is the other's fault."""
    return "; ".join(
        f"{c.name}: {c.message} ({c.remedy})" for c in checks if c.status == "Fail" and c.name.startswith(GPU) == gpu
    )


def kernel(release: str) -> Finding:
    """Whether the kernel is new enough."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match and (int(match[1]), int(match[2])) >= KERNEL_MINIMUM:
        return passed(release)
    return failed(f"Linux {release}", f"run a kernel of at least {KERNEL_MINIMUM[0]}.{KERNEL_MINIMUM[1]} on this node")


def machine(name: str) -> Finding:
    """Only what CRIU and its libraries were built for."""
    if name == "x86_64":
        return passed(name)
    return failed(f"machine type {name}", "use x86_64 nodes; label them and set the agent's nodeSelector")


def criu_works(criu: Criu) -> Finding:
    """Version and kernel features, as CRIU itself sees them."""
    try:
        version = criu.version()
        parts = tuple(int(x) for x in re.findall(r"\d+", version)[:3])
        if parts < MINIMUM:
            return failed(f"CRIU {version}", f"install CRIU {'.'.join(map(str, MINIMUM))} or newer in {criu.prefix}")
        return passed(f"{version}: {criu.check()}")
    except CriuError as e:
        return failed(str(e), f"the agent's image brings CRIU in {criu.prefix}; the kernel needs CONFIG_CHECKPOINT_RESTORE")


def capabilities(status: str) -> Finding:
    """What the agent may do. `status` is the text of /proc/self/status."""
    line = next((x for x in lines(status) if x.startswith("CapEff:")), "CapEff: 0")
    held = int(line.split()[1], 16)
    missing = [f"{name} ({why})" for name, (bit, why) in CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        return failed(f"missing: {', '.join(missing)}", "run the agent privileged")
    if not held >> CAP_SYS_RESOURCE & 1:
        return warned(
            "without CAP_SYS_RESOURCE a server that does not run as root cannot be captured", "run the agent privileged"
        )
    return passed("all")


def host_pids(proc: Path) -> Finding:
    """The agent must see the containers' processes: hostPID. A kernel thread or another init is then PID 1 or 2."""
    if (proc / "2/comm").exists() and (proc / "2/comm").read_text().strip() == "kthreadd":
        return passed("the node's")
    depth = next((x for x in lines((proc / "self/status").read_text()) if x.startswith("NSpid:")), "").split()[1:]
    if len(depth) > 1:
        return failed("the agent has a PID namespace of its own", "set hostPID: true")
    # A node that is itself a container (kind) has no kernel threads in sight.
    return passed("the node's (a container)")


def last_pid(proc: Path) -> Finding:
    """Whether PIDs can be chosen. Writing back what is there changes nothing of weight: the next PID stays free to choose."""
    file = proc / "sys/kernel/ns_last_pid"
    try:
        fd = os.open(file, os.O_WRONLY)
    except OSError as e:
        return failed(
            f"{file}: {e.strerror}",
            "run the agent privileged (its /proc/sys must be writable), kernel with CONFIG_CHECKPOINT_RESTORE",
        )
    os.close(fd)
    return passed("writable")


def cgroups(mountinfo: str, init: str, root: Path) -> Finding:
    """Whether every hierarchy of the node is mounted below `root`, writable."""
    mounts = [m for m in parse_mountinfo(mountinfo) if m.kind in ("cgroup", "cgroup2") and Path(m.point).is_relative_to(root)]
    missing = []
    for line in lines(init):
        names = line.split(":", 2)[1]
        for mount in mounts:
            if mount.kind == "cgroup2" if not names else set(names.removeprefix("name=").split(",")) <= _names(mount.options):
                break
        else:
            missing.append(names or "v2")
    kinds = sorted({"v2" if m.kind == "cgroup2" else "v1" for m in mounts})
    if missing:
        return failed(f"not mounted below {root}: {', '.join(missing)}", "mount the node's /sys/fs/cgroup into the agent")
    read_only = [m.point for m in mounts if not os.access(m.point, os.W_OK)]
    if read_only:
        return failed(f"read-only: {', '.join(read_only)}", "mount the node's /sys/fs/cgroup writable into the agent")
    return passed(" and ".join(kinds) or "none")


def _names(options: dict[str, str]) -> set[str]:
    return {value if name == "name" else name for name, value in options.items()}


def store_writable(store_dir: Path) -> Finding:
    """Write, sync and remove a file."""
    file = store_dir / f".doctor-{secrets.token_hex(4)}"
    try:
        store_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x")
            os.fsync(fd)
        finally:
            os.close(fd)
            file.unlink()
    except OSError as e:
        return failed(f"{store_dir} cannot be written: {e.strerror}", "give the agent a writable host directory (agent.storeDir)")
    return passed(str(store_dir))


def disk(store_dir: Path) -> Finding:
    """Free space for artifacts."""
    space = os.statvfs(store_dir)
    free = space.f_bavail * space.f_frsize
    text = f"{free / (1 << 30):.1f} GiB free in {store_dir}"
    remedy = "free space, put agent.storeDir on a larger disk, or lower artifact.retain"
    if free < DISK_NEEDED:
        return failed(text, remedy)
    return warned(text, remedy) if free < DISK_WANTED else passed(text)


def kubelet(kubelet_dir: Path) -> Finding:
    """Whether the pods' volumes are in sight."""
    if (kubelet_dir / "pods").is_dir():
        return passed(str(kubelet_dir))
    return failed(f"{kubelet_dir}/pods is not there", "set agent.kubeletDir to the kubelet's --root-dir")


def io_uring(proc: Path) -> Finding:
    """Rings cannot be dumped. uvloop makes one where it can."""
    try:
        value = (proc / "sys/kernel/io_uring_disabled").read_text().strip()
    except FileNotFoundError:
        value = "0"
    if value == "2":
        return passed("off")
    return passed("on; the replicas' seccompProfile must refuse it (RuntimeDefault of containerd from 2.0 on does)")


def memory(meminfo: str) -> Finding:
    """How much a restore may take."""
    values = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines(meminfo) if line.endswith("kB")}
    free = values.get("MemAvailable", 0)
    text = f"{free / (1 << 30):.1f} GiB of {values.get('MemTotal', 0) / (1 << 30):.1f} GiB available"
    return warned(text, "a restore takes its memory at once") if free < 1 << 30 else passed(text)
