"""PID 1 of a bare container: makes its mounts, starts what it is told to, reaps. `bare_init.py JSON` (see bare.py)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping


def mounts(base: str, control: str, more: Mapping[str, str]) -> None:
    """An overlay on the machine's root as the container's root, with volumes as a pod has them, and `more` (path: what is there)."""
    root = f"{base}/merged"
    script = f"""
    set -e
    mount --make-rprivate /
    mount -t overlay overlay -o lowerdir=/,upperdir={base}/upper,workdir={base}/work {root}
    mount -t proc proc {root}/proc
    mount --bind {root}/proc/sys {root}/proc/sys
    mount -o remount,bind,ro {root}/proc/sys
    mount -t sysfs -o ro sysfs {root}/sys
    mount -t tmpfs tmpfs {root}/dev
    for name in null zero full random urandom; do touch {root}/dev/$name; mount --bind /dev/$name {root}/dev/$name; done
    mkdir {root}/dev/shm
    mount -t tmpfs tmpfs {root}/dev/shm
    mount -t tmpfs tmpfs {root}/tmp
    mkdir {root}/tmp/volume
    hostname > {base}/hostname
    mount --bind {base}/hostname {root}/etc/hostname
    mount -t tmpfs tmpfs {root}/tmp/volume
    mount -t tmpfs tmpfs {root}/run
    mkdir {root}/run/vllmsnapshot
    mount --bind {base}/{control} {root}/run/vllmsnapshot
    mkdir -p {root}/old
    ip link set lo up
    """
    subprocess.run(["sh", "-c", script], check=True)
    for path, source in more.items():
        target = root + path
        os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(source):
            open(target, "a").close()
        subprocess.run(["mount", "--bind", source, target], check=True)
    os.chdir(root)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(155, b".", b"old"):  # pivot_root
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    subprocess.run(["umount", "-l", "/old"], check=True)


def main() -> None:
    """Mount, announce, start on a line of stdin, reap for ever."""
    task = json.loads(sys.argv[1])
    mounts(task["base"], task["control"], task["mounts"])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    print("init", flush=True)
    command = task["command"]
    if command:
        sys.stdin.readline()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            os.setsid()
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, 0)
            os.closerange(3, 1024)
            os.makedirs("/var/lib/bare", exist_ok=True)
            os.chown("/var/lib/bare", task["uid"], task["uid"])
            if task["uid"]:
                os.setgroups([])
                os.setresgid(task["uid"], task["uid"], task["uid"])
                os.setresuid(task["uid"], task["uid"], task["uid"])
            os.execv(command[0], command)
    while True:
        signal.sigwait([signal.SIGCHLD])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


if __name__ == "__main__":
    main()
