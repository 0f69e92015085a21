"""A seccomp profile that refuses io_uring, on this node's disk where the kubelet looks for profiles.

CRIU cannot dump a ring, and uvloop opens one wherever it may. The replicas' profile RuntimeDefault refuses io_uring in containerd from
2.0 and Docker from 25 on, but not in older runtimes, and a pod that is Unconfined for another reason has nothing in the way. Such
pods may name this profile instead:

    securityContext: {seccompProfile: {type: Localhost, localhostProfile: vllmsnapshot/no-io-uring.json}}

It is a list of what is refused, not of what is allowed as RuntimeDefault is: all that containerd 2.3 refuses to a container without
capabilities. A list of what is allowed would be five times as long, and each kernel and C library that brings a new call would
find it too short. The price: calls that are newer than this list are allowed, `personality` is, and programs of 32 bits are killed.
Where RuntimeDefault refuses io_uring it is the better one.

The file is never removed: a container that names it could not be started any more.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path
from typing import Any, Final

from vllmsnapshot_child import protocol

from .doctor import Finding, passed, warned
from .namespaces import CLONE_NEWCGROUP, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWUTS

PROFILE: Final = "vllmsnapshot/no-io-uring.json"
"""Below the kubelet's `seccomp` directory; `localhostProfile` of a pod."""

_NOT_THERE: Final = ("clone3", "io_uring_enter", "io_uring_register", "io_uring_setup")
"""ENOSYS, as an older kernel says it: libraries then take another way. For clone3 it is clone, whose flags a filter can see."""

_FORBIDDEN: Final = """
acct add_key afs_syscall bpf chroot clock_settime create_module delete_module fanotify_init finit_module fsconfig fsmount
fsopen fspick get_kernel_syms get_mempolicy getpmsg init_module ioperm iopl kcmp kexec_file_load kexec_load keyctl
lookup_dcookie mbind migrate_pages mount mount_setattr move_mount move_pages nfsservctl open_by_handle_at open_tree
perf_event_open pidfd_getfd pivot_root process_madvise putpmsg query_module quotactl quotactl_fd reboot request_key security
set_mempolicy set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon sysfs _sysctl syslog tuxcall
umount2 unshare uselib userfaultfd ustat vhangup vserver
"""
"""EPERM. What containerd 2.3 refuses to a container without capabilities, of the calls of x86-64 that libseccomp knows."""

_NAMESPACES: Final = (
    CLONE_NEWNS,
    CLONE_NEWCGROUP,
    CLONE_NEWUTS,
    CLONE_NEWIPC,
    CLONE_NEWUSER,
    CLONE_NEWPID,
    CLONE_NEWNET,
)
_FAMILIES: Final = (socket.AF_ALG, socket.AF_VSOCK)


def profile() -> dict[str, Any]:
    """The profile, as the runtime specification has it."""

    def refused(names: list[str], number: int, *args: dict[str, Any]) -> dict[str, Any]:
        rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number}
        return {**rule, "args": list(args)} if args else rule

    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [
            refused(list(_NOT_THERE), errno.ENOSYS),
            refused(_FORBIDDEN.split(), errno.EPERM),
            *(
                refused(["clone"], errno.EPERM, {"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"})
                for flag in _NAMESPACES
            ),
            *(refused(["socket"], errno.EPERM, {"index": 0, "value": int(x), "op": "SCMP_CMP_EQ"}) for x in _FAMILIES),
        ],
    }


def install(kubelet_dir: Path) -> None:
    """Write the profile unless it is there: whole, durable, atomic. Raises OSError."""
    path = kubelet_dir / "seccomp" / PROFILE
    kubelet_dir.stat()  # nothing is made below a directory that is not the kubelet's
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with protocol.open_dir(str(path.parent)) as fd:
        with contextlib.suppress(protocol.ProtocolError):
            if protocol.read(fd, path.name) == profile():
                return
        protocol.write(fd, path.name, profile())


def check(kubelet_dir: Path, *, wanted: bool) -> Finding:
    """The doctor's finding; installs the profile if it is wanted and not there."""
    if wanted:
        try:
            install(kubelet_dir)
        except OSError as e:
            return warned(
                f"{PROFILE} cannot be written: {e.strerror}; a pod that names it does not start here",
                "make the kubelet's directory writable for the agent, or use seccompProfile RuntimeDefault",
            )
    if (kubelet_dir / "seccomp" / PROFILE).is_file():
        return passed(f"{PROFILE} is there")
    return passed(f"{PROFILE} is not installed (agent.seccompProfile): a pod that names it does not start here")
