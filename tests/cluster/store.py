"""containerd's image stores, which outlive the clusters that use them: images stay, containers go.

Importing a vLLM image takes half a minute, so the stores are not the clusters' own: there are numbered slots, and a
cluster claims the first that no other one uses. In the usual case, one cluster at a time, that is always the same one,
whatever the clusters are called.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.cluster import cache, config
from tests.cluster.errors import ClusterError
from tests.cluster.process import contained, run, tail_of

_SLOTS: Final = 8


@contextlib.contextmanager
def sandboxed(command: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon, contained (see :func:`tests.cluster.process.contained`), for the length of a block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            contained(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen[bytes], probe: Sequence[str | Path], log: Path, *, seconds: float = 30) -> None:
    """Wait until *probe* exits with 0, or fail with the log if the daemon ends first."""
    deadline = time.monotonic() + seconds
    while run(probe, check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(f"{log.stem} did not start:\n{tail_of(log)}")
        time.sleep(0.05)


def claim(owner: str) -> Path:
    """Give *owner* (a cluster's name) a store that no other cluster uses, and return its directory."""
    with cache.lock("image-stores"):
        for number in range(_SLOTS):
            directory = _slots() / str(number)
            if not _owner_file(directory).exists():
                directory.mkdir(parents=True, exist_ok=True)
                cache.write_atomic(_owner_file(directory), owner)
                return directory
    raise ClusterError(f"all {_SLOTS} image stores are in use; take a cluster down")


def release(owner: str, node: Callable[[], Path]) -> None:
    """Remove the containers of *owner* from the stores it has claimed, and give those up."""
    for owned in _slots().glob("*.owner"):
        if owned.read_text() != owner:
            continue
        directory = owned.with_suffix("")
        if (directory / "io.containerd.metadata.v1.bolt").exists():
            _scrub(directory, node())
        # Only now: until a store is clean, nobody else gets it.
        owned.unlink()


def _slots() -> Path:
    return cache.cache_root() / "containerd"


def _owner_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.owner")


def _scrub(directory: Path, node: Path) -> None:
    """Delete every container, sandbox and writable layer in a store; *node* has containerd and ctr."""
    work = directory.with_name(f"{directory.name}.scrub")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        settings = work / "containerd.toml"
        settings.write_text(config.scrub_containerd(directory, work))
        log = work / "containerd.log"
        ctr: list[str | Path] = [node / "ctr", "-a", work / "containerd.sock", "-n", "k8s.io"]
        with sandboxed([node / "containerd", "--config", settings], log) as process:
            wait_for(process, [*ctr, "version"], log)
            _delete_all(ctr)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _delete_all(ctr: Sequence[str | Path]) -> None:
    containers = run([*ctr, "containers", "ls", "-q"]).stdout.split()
    if containers:
        run([*ctr, "containers", "rm", *containers])
    sandboxes = [line.split()[0] for line in run([*ctr, "sandboxes", "ls"]).stdout.splitlines()[1:] if line.strip()]
    if sandboxes:
        run([*ctr, "sandboxes", "rm", "--force", *sandboxes])
    # What is not committed belonged to a container; committed ones are the images' layers.
    for line in run([*ctr, "snapshots", "--snapshotter", "overlayfs", "ls"]).stdout.splitlines()[1:]:
        fields = line.split()
        if fields and fields[-1] != "Committed":
            run([*ctr, "snapshots", "--snapshotter", "overlayfs", "rm", fields[0]], check=False)
    # CRI adds a name of its own to every image, by its ID, which keeps the content of a replaced build alive for ever.
    images = [line.split()[:3] for line in run([*ctr, "images", "ls"]).stdout.splitlines()[1:] if line.strip()]
    named = {target for reference, _, target in images if not reference.startswith("sha256:")}
    stale = [reference for reference, _, target in images if target not in named]
    if stale:
        run([*ctr, "images", "rm", "--sync", *stale])
    for line in run([*ctr, "leases", "ls", "-q"], check=False).stdout.split():
        run([*ctr, "leases", "rm", line], check=False)
