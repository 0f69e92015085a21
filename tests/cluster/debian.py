"""The base image: a Debian root file system by debootstrap, for machines that reach no image registry."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from tests.cluster import cache, host, oci
from tests.cluster.process import contained, run
from tests.cluster.progress import Progress

SUITE: Final = "bookworm"
#: The environment variable that names another mirror.
MIRROR_VARIABLE: Final = "VLLMSNAPSHOT_DEBIAN_MIRROR"
#: What python:3.11-slim-bookworm has and minbase lacks.
_PACKAGES: Final = ("ca-certificates", "python3", "python3-venv")
#: Documentation and package lists: 60 MB that no container reads.
_DROPPED: Final = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
    "var/lib/apt/lists",
    "var/cache/apt",
    "var/cache/debconf",
    "var/log",
)


def mirror() -> str | None:
    """The Debian mirror that this machine uses; None if it uses none (it is no Debian): debootstrap and images know theirs."""
    if chosen := os.environ.get(MIRROR_VARIABLE):
        return chosen
    if shutil.which("apt-get") is not None:
        targets = run(
            ["apt-get", "indextargets", "--format", "$(CODENAME) $(LABEL) $(REPO_URI)", "Created-By: Packages"],
            check=False,
        )
        for line in targets.stdout.splitlines():
            found = re.fullmatch(rf"{SUITE} Debian (\S+)", line.strip())
            if found:
                return found[1].rstrip("/")
    return None


def apt_settings() -> str:
    """This machine's apt settings that a build has to share: its proxy, and what it says of its clock."""
    if shutil.which("apt-config") is None:
        return ""
    wanted = re.compile(r"Acquire::(https?::Proxy|Check-Valid-Until|Check-Date) .*;")
    return "".join(f"{line}\n" for line in run(["apt-config", "dump"]).stdout.splitlines() if wanted.fullmatch(line))


def base_image(progress: Progress) -> oci.Image:
    """The base image as an OCI layout, made once."""

    def build(directory: Path) -> None:
        host.ensure(("debootstrap",), progress)
        root = directory / "root"
        with progress.step(f"debootstrap {SUITE}"):
            include = f"--include={','.join(_PACKAGES)}"
            where = [found] if (found := mirror()) else []
            run(
                # Contained above all because it mounts /proc and /sys in the new root: left behind by a kill, they would
                # be in the way of whoever removes it.
                contained(["debootstrap", "--variant=minbase", include, SUITE, root, *where]),
                log=directory / "debootstrap.log",
                env={"PATH": host.search_path()},
                timeout=1800,
            )
        for name in _DROPPED:
            for path in (root / name).iterdir() if (root / name).is_dir() else ():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        # apt needs its empty directories; the machine's mirror is not for those who use the image elsewhere.
        (root / "var/lib/apt/lists/partial").mkdir(parents=True, exist_ok=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True, exist_ok=True)
        layer = directory / "layer.tar"
        run(
            [
                *("tar", "--sort=name", "--mtime=@0", "--numeric-owner", "--xattrs", "--one-file-system", "-cf", layer),
                *("--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./sys/*", "-C", root, "."),
            ],
            timeout=600,
        )
        shutil.rmtree(root)
        oci.write_image(
            directory,
            layer,
            {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["bash"]},
        )

    key = cache.digest(SUITE, *_PACKAGES, *_DROPPED)
    layout = cache.publish(
        "image-base", key, build, on_wait=lambda: progress.note("another process makes the base image; waiting")
    )
    return oci.Image("vllmsnapshot.local/base:1", layout, oci.only_manifest(layout))
