"""promtool, out of Debian's package of Prometheus: unpacked into the cache, nothing is installed on the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster import cache
from tests.cluster.errors import ClusterError
from tests.cluster.process import run
from tests.cluster.progress import Progress

PACKAGE = "prometheus"


def promtool(progress: Progress) -> Path:
    """The machine's own promtool if it has one, else the packaged one."""
    own = shutil.which("promtool")
    if own is not None:
        return Path(own)

    def build(directory: Path) -> None:
        if shutil.which("apt-get") is None:
            raise ClusterError("please install promtool (this machine has no apt-get)")
        with progress.step("fetching promtool"):
            run(["apt-get", "update", "-q"], timeout=600)
            # Else apt gives up root, and cannot write into the directory.
            run(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", PACKAGE], cwd=directory, timeout=600)
            (package,) = directory.glob(f"{PACKAGE}_*.deb")
            run(["dpkg-deb", "-x", package, directory / "root"], timeout=120)
            shutil.move(directory / "root" / "usr" / "bin" / "promtool", directory / "promtool")
            shutil.rmtree(directory / "root")
            package.unlink()

    return cache.publish("promtool", cache.digest(PACKAGE), build) / "promtool"
