"""The cluster's PID 1: makes the namespaces, prepares them, then starts and reaps the cluster's daemons.

Run by path with the standard library alone (``python -I -S box.py RUN_DIR``), because it must stay small and must not
depend on where the checkout is. Everything of the cluster, containers included, descends from this process's PID
namespace, so one SIGKILL to it ends all of them at once and the kernel then drops the mounts, the network and the
namespaces. That is the whole crash story: nothing has to be undone in order.

Conversation with the parent (:mod:`tests.cluster.cluster`), in this order:

1. stdout: the host PID of the namespace's init; stdin: ``go`` once that PID is on record. Until then nothing exists
   that would have to be cleaned up, so a parent that dies in between leaves nothing behind.
2. ``box.ready`` appears in the run directory when the namespaces are prepared.
3. ``control`` (a FIFO) takes ``start NAME`` and ``stop NAME SIGNAL``; ``daemons/NAME.spec.json`` says what to start and
   ``daemons/NAME.json`` what became of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

#: Not per network namespace, and the kubelet sets them; a bind-mounted file takes the write instead of the machine.
SHIELDED_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def command(*argv: str) -> None:
    """Run one set-up command; its failure ends the box with the reason in the log."""
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def prepare(run: Path, spec: dict[str, Any]) -> None:
    """Prepare mounts, host name and network of the new namespaces."""
    command("mount", "--make-rprivate", "/")
    command("mount", "-t", "proc", "proc", "/proc")
    # containerd's sockets, the pods' network namespaces, locks: all of it stays in here.
    command("mount", "-t", "tmpfs", "-o", "mode=755", "cluster-run", "/run")
    Path("/run/lock").mkdir()
    shields = Path("/run/sysctl")
    shields.mkdir()
    for name, value in SHIELDED_SYSCTLS.items():
        if Path("/proc/sys", name).exists():
            file = shields / name.replace("/", ".")
            file.write_text(value + "\n")
            command("mount", "--bind", str(file), f"/proc/sys/{name}")
    # Paths that are compiled into kubelet (/var/log/containers) and libcni (/var/lib/cni).
    for place in ("upper", "work"):
        (run / "var-lib" / place).mkdir(parents=True)
    options = f"lowerdir=/var/lib,upperdir={run}/var-lib/upper,workdir={run}/var-lib/work"
    command("mount", "-t", "overlay", "-o", options, "cluster-var-lib", "/var/lib")
    (run / "var-log").mkdir()
    command("mount", "--bind", f"{run}/var-log", "/var/log")
    # Volumes with mountPropagation need a shared root; it is shared among the cluster's namespaces only.
    command("mount", "--make-rshared", "/")

    socket.sethostname(spec["hostname"])
    command("ip", "link", "set", "lo", "up")
    bridge, address = spec["bridge"], spec["address"]
    command("ip", "link", "add", bridge, "type", "bridge")
    command("ip", "address", "add", f"{address}/{spec['prefix']}", "dev", bridge)
    command("ip", "link", "set", bridge, "up")
    # Nothing is out there, but kubelet and apiserver look for a default route to find the machine's address.
    command("ip", "route", "add", "default", "via", address)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    # kube-proxy's service addresses between two pods on one bridge.
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        bridged.write_text("1")


class Daemons:
    """The daemons by name. Their state is in files, because the ones who ask come and go."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._directory = run / "daemons"
        self._by_pid: dict[int, str] = {}

    def start(self, name: str) -> None:
        """Start the daemon that ``NAME.spec.json`` describes, unless it is running."""
        if name in self._by_pid.values():
            return
        spec = json.loads((self._directory / f"{name}.spec.json").read_text())
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            spec["argv"][0],
            spec["argv"],
            spec["env"],
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, spec["log"], flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
        )
        self._by_pid[pid] = name
        self._record(name, {"pid": pid, "state": "running"})

    def stop(self, name: str, number: int) -> None:
        """Send a signal to a running daemon; what comes of it is recorded when it ends."""
        for pid, running in self._by_pid.items():
            if running == name:
                os.kill(pid, number)

    def reap(self) -> None:
        """Collect every child that has ended: daemons, and the orphans that any PID 1 inherits."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._by_pid.pop(pid, None)
            if name is not None:
                self._record(name, {"pid": pid, "state": "exited", "code": os.waitstatus_to_exitcode(status)})

    def _record(self, name: str, value: dict[str, Any]) -> None:
        temporary = self._directory / f".{name}.tmp"
        temporary.write_text(json.dumps(value))
        temporary.replace(self._directory / f"{name}.json")


def serve(run: Path) -> None:
    """Take commands from the control FIFO and reap children, for ever."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Read and write: as long as one writer (this one) exists, readers never see an end of file.
    control = os.open(run / "control", os.O_RDWR | os.O_NONBLOCK)
    daemons = Daemons(run)
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    poll.register(control, select.POLLIN)
    (run / "box.ready").touch()
    pending = b""
    while True:
        for fd, _ in poll.poll():
            if fd == wake_read:
                os.read(wake_read, 4096)
                daemons.reap()
                continue
            pending += os.read(control, 65536)
            *lines, pending = pending.split(b"\n")
            for line in lines:
                try:
                    verb, name, *rest = line.decode().split()
                    if verb == "start":
                        daemons.start(name)
                    elif verb == "stop":
                        daemons.stop(name, int(rest[0]))
                except Exception as error:  # PID 1 must outlive any bad command
                    print(f"box: {line!r}: {error!r}", file=sys.stderr, flush=True)


def main() -> None:
    """Make the namespaces, hand over the new init's PID, wait for the word, and become PID 1."""
    run = Path(sys.argv[1])
    spec = json.loads((run / "box.spec.json").read_text())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    pid = os.fork()
    if pid != 0:
        # The parent only carries the news; the child goes on as an orphan when it leaves.
        os.write(1, f"{pid}\n".encode())
        return
    if os.read(0, 2) != b"go":
        return
    os.closerange(3, 1024)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    # The log (stderr) takes over stdout, whose pipe ends with the parent.
    os.dup2(2, 1)
    prepare(run, spec)
    serve(run)


if __name__ == "__main__":
    main()
