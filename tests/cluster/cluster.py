"""One cluster: bring it up, use it, and leave nothing behind, whatever happened in between."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.cluster import build, cache, cgroups, config, host, namespaces, oci, pki, store
from tests.cluster.config import Daemon, Mode, Paths
from tests.cluster.errors import ClusterError
from tests.cluster.gpus import RESOURCE, Gpus
from tests.cluster.process import Argument, ProcessRecord, run, tail_of
from tests.cluster.progress import Progress

_NAME: Final = re.compile(r"[a-z0-9](-?[a-z0-9]){0,19}")
#: Unix socket paths are limited to 107 bytes, and the kubelet puts sockets 40 below its root directory.
_LONGEST_RUN_DIRECTORY: Final = 60


class Cluster:
    """A local Kubernetes cluster by name; instances are handles, the state is on disk and in the kernel.

    *mode* ``node`` is a whole cluster of one node, ``controlplane`` etcd, apiserver and the controllers that need no
    node. *gpus* is how many fake GPUs the node has (see :mod:`tests.cluster.gpus`). As a context manager it starts afresh and takes
    everything down at the end.
    """

    def __init__(self, name: str = "dev", mode: Mode = "node", *, gpus: int = 0, progress: Progress | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise ClusterError(f"not a cluster name (lower case letters, digits, single dashes, at most 20): {name!r}")
        self.name = name
        self._mode: Mode = mode
        self._gpus = gpus
        self._progress = progress or Progress(quiet=True)
        root = cache.cache_root()
        self._run_directory = root / "run" / name
        if len(str(self._run_directory)) > _LONGEST_RUN_DIRECTORY:
            raise ClusterError(f"path too long for the sockets in it: {self._run_directory} (set XDG_CACHE_HOME)")
        self._paths = Paths(self._run_directory)
        self._kept_logs = root / "logs" / name
        self._cgroup = cache.scoped(f"vllmsnapshot-{name}")

    def __enter__(self) -> Cluster:
        self.up(fresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    # Paths. They are the same inside the cluster's mount namespace and outside.

    @property
    def mode(self) -> Mode:
        """``node`` or ``controlplane``: of the running cluster if there is one."""
        found = self._spec().get("mode", self._mode)
        return "controlplane" if found == "controlplane" else "node"

    @property
    def gpus(self) -> Gpus:
        """The node's fake GPUs: of the running cluster if there is one."""
        return Gpus(self._paths.gpus, int(self._spec().get("gpus", self._gpus)))

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; its server is reachable in the cluster's network namespace."""
        return self._paths.kubeconfig("admin")

    @property
    def node_root(self) -> Path:
        """The directory of everything that belongs to this run of the cluster."""
        return self._run_directory

    @property
    def kubelet_dir(self) -> Path:
        """The kubelet's root directory: the chart's ``agent.kubeletDir``."""
        return self._paths.kubelet

    @property
    def store_dir(self) -> Path:
        """A directory on the node for artifacts."""
        return self._paths.store

    @property
    def cgroup_dirs(self) -> list[Path]:
        """The cluster's cgroup in every hierarchy."""
        return [hierarchy / self._cgroup for hierarchy in cgroups.hierarchies()]

    @property
    def pod_logs_dir(self) -> Path:
        """What the pods' /var/log/pods is on this machine."""
        return self._run_directory / "var-log" / "pods"

    @property
    def logs_dir(self) -> Path:
        """The daemons' logs; after ``down`` the last run's are in ``logs/NAME`` of the cache."""
        return self._paths.logs

    @property
    def pid(self) -> int:
        """The host's PID of the cluster's init process; an error if the cluster is not up."""
        record = self._record()
        if record is None or not record.alive():
            raise ClusterError(f"cluster {self.name!r} is not up (python -m tests.cluster up --name {self.name})")
        return record.pid

    # Life.

    def up(self, *, fresh: bool = False) -> None:
        """Start the cluster; one that is already up as it should be stays, unless *fresh*."""
        host.require_root()
        # Built before the lock is taken: the first time this takes a quarter of an hour.
        directories = self._binaries(self._mode, self._gpus)
        with self._lock():
            if not fresh and self.suits():
                self._progress.note(f"cluster {self.name!r} is already up")
                return
            self._remove()
            try:
                self._start(directories)
            except BaseException:
                with self._progress.step("taking down what was started"):
                    self._remove()
                raise

    def down(self) -> None:
        """Remove every trace of the cluster but its image store; harmless if there is none."""
        host.require_root()
        with self._lock():
            self._remove()

    def healthy(self) -> bool:
        """Whether the cluster is up, its daemons run, and the apiserver says it is ready."""
        record = self._record()
        if record is None or not record.alive():
            return False
        states = self.daemons()
        return bool(states) and all(state == "running" for state in states.values()) and self._ready("/readyz")

    def suits(self) -> bool:
        """Whether the cluster is up, healthy, and in the mode and with the GPUs of this handle."""
        return self.mode == self._mode and self.gpus.count == self._gpus and self.healthy()

    def daemons(self) -> dict[str, str]:
        """The daemons by name: ``running`` or ``exited (CODE)``."""
        found = {}
        for path in sorted(self._paths.daemons.glob("[a-z]*.json")):
            if path.name.endswith(".spec.json"):
                continue
            try:
                state = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            exited = state["state"] != "running"
            found[path.stem] = f"exited ({state['code']})" if exited else "running"
        return found

    # Use.

    @contextlib.contextmanager
    def enter_network(self) -> Iterator[None]:
        """Run the calling thread, and what it starts, in the cluster's network namespace; come back afterwards."""
        with namespaces.network_namespace(self.pid):
            yield

    def audited(self, user: str) -> list[dict[str, Any]]:
        """The requests of a service account (``system:serviceaccount:NAMESPACE:NAME``), as the apiserver's audit log has them."""
        lines = self._paths.audit_log.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["user"]["username"] == user]

    def kubectl(self, *arguments: Argument, input: str | None = None, timeout: float = 120.0) -> str:  # noqa: A002
        """Run kubectl as administrator, in the caller's directory, and return its output."""
        return run(self.kubectl_command(*arguments), stdin=input, timeout=timeout).stdout

    def kubectl_command(self, *arguments: Argument) -> list[str]:
        """The command line behind :meth:`kubectl`, for callers that want to stream or exec."""
        program = build.find("kubectl", self._progress, (build.KUBERNETES,))
        command = ["env", f"KUBECONFIG={self.kubeconfig}", program, *arguments]
        return namespaces.enter_command(self.pid, command, network_only=True)

    def helm(self, *arguments: Argument, input: str | None = None, timeout: float = 600.0) -> str:  # noqa: A002
        """Run Helm as administrator, in the caller's directory, and return its output."""
        return run(self.helm_command(*arguments), stdin=input, timeout=timeout).stdout

    def helm_command(self, *arguments: Argument) -> list[str]:
        """The command line behind :meth:`helm`."""
        program = build.find("helm", self._progress, (build.HELM,))
        command = ["env", f"KUBECONFIG={self.kubeconfig}", program, *arguments]
        return namespaces.enter_command(self.pid, command, network_only=True)

    def exec(self, command: Sequence[Argument], *, input: str | None = None, timeout: float | None = None) -> str:  # noqa: A002
        """Run a command on the "node" (the cluster's mounts, network and PIDs) and return its output."""
        return run(self.exec_command(command), stdin=input, timeout=timeout).stdout

    def exec_command(self, command: Sequence[Argument]) -> list[str]:
        """The command line behind :meth:`exec`."""
        environment = [f"{name}={value}" for name, value in self.environment().items()]
        return namespaces.enter_command(self.pid, ["env", *environment, *command])

    def environment(self) -> dict[str, str]:
        """What :meth:`exec` adds to the environment: the cluster's tools and its kubeconfig."""
        directories = self._binaries(self.mode, 0)
        path = os.pathsep.join([*(str(directory) for directory in directories.values()), host.search_path()])
        return {"PATH": path, "KUBECONFIG": str(self.kubeconfig), "CONTAINERD_ADDRESS": config.CONTAINERD_SOCKET}

    def load_image(self, image: Path | oci.Image) -> None:
        """Import an image (an OCI archive, or one in a layout) unless its name already stands for this content."""
        wanted = {image.reference: image.digest} if isinstance(image, oci.Image) else oci.archive_images(image)
        present = self.images()
        if all(present.get(reference) == digest for reference, digest in wanted.items()):
            return
        with self._progress.step(f"importing {', '.join(wanted)}"):
            importing = [*self._ctr(), "images", "import", "--local", "--snapshotter", "overlayfs"]
            if isinstance(image, Path):
                self.exec([*importing, image], timeout=900)
                return
            blobs = self.exec([*self._ctr(), "content", "ls", "-q"]).split()
            self._import_stream(image, self.exec_command([*importing, "-"]), blobs)

    def _import_stream(self, image: oci.Image, command: Sequence[str], present: Sequence[str]) -> None:
        log = self._paths.logs / "import.log"
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            assert process.stdin is not None
            with process, contextlib.suppress(BrokenPipeError), process.stdin:
                image.write_archive(process.stdin, without=present)
        if process.returncode != 0:
            raise ClusterError(f"import of {image.reference} failed:\n{tail_of(log).strip()}")

    def images(self) -> dict[str, str]:
        """Names and digests of the images on the node."""
        found = {}
        for line in self.exec([*self._ctr(), "images", "ls"]).splitlines()[1:]:
            fields = line.split()
            if len(fields) >= 3:
                found[fields[0]] = fields[2]
        return found

    def allocatable_gpus(self) -> int:
        """How many healthy GPUs the node has by the kubelet's word."""
        return int(self._node_status().get("allocatable", {}).get(RESOURCE, 0))

    def start_daemon(self, name: str) -> None:
        """Start a daemon again after :meth:`stop_daemon`."""
        self._command(f"start {name}")
        self._wait_for(f"{name} to start", lambda: self.daemons().get(name) == "running", 10, watch=False)

    def stop_daemon(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop one daemon, as in "what if the kubelet dies", and wait until it has ended."""
        self._command(f"stop {name} {int(number)}")
        self._wait_for(f"{name} to end", lambda: self.daemons().get(name) != "running", 30, watch=False)

    # Starting.

    def _binaries(self, mode: Mode, gpus: int) -> dict[str, Path]:
        groups = (build.KUBERNETES, build.NODE, *([build.DEVICE_PLUGIN] if gpus else []))
        return {group.name: build.binaries(group, self._progress) for group in groups}

    def _start(self, directories: Mapping[str, Path]) -> None:
        node = self._mode == "node"
        host.ensure(host.RUNTIME_TOOLS, self._progress)
        note = self._progress.note
        paths = self._paths
        paths.run.mkdir(parents=True)
        cgroups.create(self._cgroup)
        if node:
            paths.containerd.symlink_to(store.claim(self.name))
        config.write_files(paths, self._cgroup, directories["node"] if node else None)
        pki.issue_all(
            paths.certificates,
            paths.run,
            address=config.ADDRESS,
            service_address=config.SERVICE_ADDRESS,
            node=config.NODE_NAME,
        )
        self._start_box()
        environment = {
            "PATH": os.pathsep.join([*(str(directory) for directory in directories.values()), host.search_path()]),
            "HOME": "/root",
            # Else kubelet and apiserver wait for a cloud's metadata server.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

        def launch(daemon: Daemon) -> None:
            program = next(d / daemon.argv[0] for d in directories.values() if (d / daemon.argv[0]).exists())
            spec = {
                "argv": [str(program), *daemon.argv[1:]],
                "env": environment,
                "log": str(paths.logs / f"{daemon.name}.log"),
            }
            cache.write_atomic(paths.daemons / f"{daemon.name}.spec.json", json.dumps(spec))
            self._command(f"start {daemon.name}")

        launch(config.etcd(paths))
        launch(config.apiserver(paths))
        if node:
            launch(config.containerd_daemon(paths))
            self._wait_for("containerd", lambda: self._quiet([*self._ctr(), "version"]), 60)
            self.load_image(self._pause_image())
        self._wait_for("the apiserver", lambda: self._ready("/readyz"), 90)
        note("apiserver ready")
        # Not earlier: their roles are made by the apiserver's start-up hooks, and without them they exit.
        launch(config.controller_manager(paths, self._mode))
        if node:
            launch(config.scheduler(paths))
            launch(config.kubelet_daemon(paths))
            launch(config.proxy(paths))
            self._wait_for("the node to become Ready", self._node_ready, 90)
            note("node Ready")
        if self._gpus:
            self.gpus.create(self._progress)
            launch(self.gpus.plugin())
            self._wait_for("the node to have its GPUs", lambda: self.allocatable_gpus() == self._gpus, 60)
            note(f"{self._gpus} x {RESOURCE} on the node")
        self._wait_for(
            "the default service account", lambda: self._ready("/api/v1/namespaces/default/serviceaccounts/default"), 60
        )
        note(f"cluster {self.name!r} is up; KUBECONFIG={self.kubeconfig}")

    def _start_box(self) -> None:
        run_directory = self._run_directory
        os.mkfifo(run_directory / "control")
        spec = {
            "mode": self._mode,
            "gpus": self._gpus,
            "hostname": config.NODE_NAME,
            "bridge": config.BRIDGE,
            "address": config.ADDRESS,
            "prefix": config.PREFIX,
        }
        (run_directory / "box.spec.json").write_text(json.dumps(spec))
        log = self._paths.logs / "box.log"
        script = Path(__file__).with_name("box.py")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(run_directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env={"PATH": host.search_path()},
            )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ClusterError(f"the cluster's namespaces could not be made:\n{tail_of(log)}")
            # On record first, then told to go: from here on `down` finds everything.
            ProcessRecord.of(int(line)).save(run_directory / "box.pid.json")
            process.stdin.write(b"go")
        self._wait_for("the namespaces", (run_directory / "box.ready").exists, 20)

    def _command(self, text: str) -> None:
        descriptor = os.open(self._run_directory / "control", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, text.encode() + b"\n")
        finally:
            os.close(descriptor)

    def _wait_for(self, what: str, probe: Callable[[], bool], seconds: float, *, watch: bool = True) -> None:
        deadline = time.monotonic() + seconds
        while not probe():
            record = self._record()
            if record is None or not record.alive():
                raise ClusterError(f"the cluster's init ended:\n{tail_of(self._paths.logs / 'box.log')}")
            exited = [name for name, state in self.daemons().items() if state != "running"] if watch else []
            if exited or time.monotonic() > deadline:
                logs = "\n".join(f"--- {n}\n{tail_of(self._paths.logs / f'{n}.log', 2000)}" for n in exited)
                reason = f"{', '.join(exited)} ended" if exited else f"not within {seconds:.0f} s"
                raise ClusterError(f"waiting for {what}: {reason} (logs: {self._kept_logs})\n{logs}")
            time.sleep(0.05)

    def _get(self, path: str) -> bytes | None:
        certificates = self._paths.certificates
        context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        context.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        try:
            with self.enter_network(), opener.open(f"https://{config.ADDRESS}:6443{path}", timeout=5) as response:
                content: bytes = response.read()
                return content
        except (urllib.error.URLError, OSError):
            return None

    def _ready(self, path: str) -> bool:
        return self._get(path) is not None

    def _node_status(self) -> dict[str, Any]:
        content = self._get(f"/api/v1/nodes/{config.NODE_NAME}")
        found: dict[str, Any] = {} if content is None else json.loads(content).get("status", {})
        return found

    def _node_ready(self) -> bool:
        return any(c["type"] == "Ready" and c["status"] == "True" for c in self._node_status().get("conditions", []))

    def _ctr(self) -> list[Argument]:
        return [build.find("ctr", self._progress, (build.NODE,)), "-n", "k8s.io"]

    def _quiet(self, command: Sequence[Argument]) -> bool:
        return run(self.exec_command(command), check=False, timeout=30).returncode == 0

    def _pause_image(self) -> oci.Image:
        """The sandbox image, from the C source that Kubernetes ships for it."""
        source = build.module_directory(build.KUBERNETES, "k8s.io/kubernetes", self._progress) / "build/pause/linux/pause.c"

        def make(directory: Path) -> None:
            host.ensure(("gcc", "/usr/lib/x86_64-linux-gnu/libc.a"), self._progress)
            program = directory / "pause"
            run(["gcc", "-Os", "-Wall", "-static", "-DVERSION=1", "-o", program, source])
            program.chmod(0o755)
            layer = directory / "layer.tar"
            oci.write_layer(layer, {"pause": program})
            program.unlink()
            # The sandbox stays root-less, as the upstream image is.
            oci.write_image(directory, layer, {"Entrypoint": ["/pause"], "User": "65535:65535"})

        layout = cache.publish("pause", cache.digest(build.KUBERNETES.key()), make)
        return oci.Image(config.PAUSE_IMAGE, layout, oci.only_manifest(layout))

    # Removing.

    def _spec(self) -> dict[str, Any]:
        """What the running cluster was made as; empty if there is none."""
        try:
            found: dict[str, Any] = json.loads((self._run_directory / "box.spec.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _record(self) -> ProcessRecord | None:
        return ProcessRecord.load(self._run_directory / "box.pid.json")

    def _lock(self) -> contextlib.AbstractContextManager[None]:
        return cache.lock(
            f"cluster-{self.name}",
            on_wait=lambda: self._progress.note(f"another process works on cluster {self.name!r}; waiting for it"),
        )

    def _remove(self) -> None:
        """Remove whatever is there of an earlier run, however it ended.

        The order matters only in so far as each step finds nothing that a later step would bring back: first the
        processes, which also ends mounts and network, then cgroups, containers in the image store, and files.
        """
        record = self._record()
        if record is not None and record.alive():
            # A frozen container would survive the kill of its PID namespace's init, and that init with it.
            cgroups.thaw(self._cgroup)
            self._kill_visitors(record.pid)
            record.kill()
        cgroups.remove(self._cgroup)
        store.release(self.name, lambda: build.binaries(build.NODE, self._progress))
        if self._paths.logs.is_dir():
            shutil.rmtree(self._kept_logs, ignore_errors=True)
            self._kept_logs.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(self._paths.logs, self._kept_logs, dirs_exist_ok=True)
        if self._run_directory.exists():
            shutil.rmtree(self._run_directory)

    def _kill_visitors(self, pid: int) -> None:
        """End processes that came in from outside and so are not in the cluster's PID namespace.

        Those are programs of ours, such as a ``kubectl port-forward``; a pytest process that merely visits the
        network namespace with a thread is left alone, for it is in its own mount namespace and runs no binary of ours.
        """
        network, mount, pids = (namespaces.inode(pid, kind) for kind in ("net", "mnt", "pid"))
        root = str(cache.cache_root())
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in (pid, os.getpid()):
                continue
            other = entry.name
            if namespaces.inode(other, "pid") == pids:
                continue
            try:
                executable = os.readlink(f"/proc/{other}/exe")
            except OSError:
                continue
            ours = executable.startswith(f"{root}/bin-") and namespaces.inode(other, "net") == network
            if ours or (mount is not None and namespaces.inode(other, "mnt") == mount):
                with contextlib.suppress(ProcessLookupError):
                    ProcessRecord.of(int(other)).kill()
