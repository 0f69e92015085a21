"""The programs of the local cluster from pinned Go modules, each group built once; and a device plugin of our own."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster import cache, host
from tests.cluster.errors import ClusterError
from tests.cluster.process import contained, run
from tests.cluster.progress import Progress

KUBERNETES_VERSION: Final = "1.36.3"
_MODULES: Final = Path(__file__).parent / "gomod"


@dataclass(frozen=True)
class Target:
    """One ``go build`` of a group: packages that share their flags."""

    packages: tuple[str, ...]
    output: str | None = None
    cgo: bool = False
    tags: str = ""
    ldflags: str = "-s -w"


@dataclass(frozen=True)
class Group:
    """Binaries out of one pinned module; the unit of caching."""

    name: str
    targets: tuple[Target, ...]
    needs: tuple[str, ...] = ()

    @property
    def module(self) -> Path:
        """The directory of go.mod and go.sum."""
        return _MODULES / self.name

    def key(self) -> str:
        """The content key: pins, source that is ours, packages and flags."""
        return cache.digest(
            self.module / "go.mod",
            self.module / "go.sum",
            *sorted(self.module.glob("*.go")),
            repr(self.targets),
            repr(sorted(host.go_environment().items())),
        )


_CONTAINERD: Final = "github.com/containerd/containerd/v2/cmd"
_CNI: Final = "github.com/containernetworking/plugins/plugins"
_VERSION_PACKAGE: Final = "k8s.io/component-base/version"

KUBERNETES: Final = Group(
    "kubernetes",
    (
        Target(
            tuple(
                f"k8s.io/kubernetes/cmd/{name}"
                for name in (
                    "kube-apiserver",
                    "kube-controller-manager",
                    "kube-scheduler",
                    "kubelet",
                    "kubectl",
                    "kube-proxy",
                )
            ),
            # Without these a module build calls itself v0.0.0-master, and clients that look at the version misbehave.
            ldflags=f"-s -w -X {_VERSION_PACKAGE}.gitVersion=v{KUBERNETES_VERSION}"
            f" -X {_VERSION_PACKAGE}.gitMajor=1 -X {_VERSION_PACKAGE}.gitMinor=36",
        ),
    ),
)
NODE: Final = Group(
    "node",
    (
        Target(
            (
                f"{_CONTAINERD}/containerd",
                f"{_CONTAINERD}/containerd-shim-runc-v2",
                f"{_CONTAINERD}/ctr",
                f"{_CNI}/main/bridge",
                f"{_CNI}/main/loopback",
                f"{_CNI}/ipam/host-local",
                f"{_CNI}/meta/portmap",
            ),
        ),
        Target(("go.etcd.io/etcd/server/v3",), output="etcd"),
        # Pods ask for seccompProfile RuntimeDefault, which a runc without libseccomp refuses.
        Target(("github.com/opencontainers/runc",), output="runc", cgo=True, tags="seccomp"),
    ),
    needs=("gcc", "pkg-config", "/usr/include/seccomp.h"),
)
BUILDKIT: Final = Group(
    "buildkit",
    (Target(("github.com/moby/buildkit/cmd/buildkitd", "github.com/moby/buildkit/cmd/buildctl")),),
)
HELM: Final = Group("helm", (Target(("helm.sh/helm/v4/cmd/helm",)),))
DEVICE_PLUGIN: Final = Group("deviceplugin", (Target(("vllmsnapshot.local/cluster/deviceplugin",)),))
ADAPTER: Final = Group("adapter", (Target(("sigs.k8s.io/prometheus-adapter/cmd/adapter",)),))
GROUPS: Final = (KUBERNETES, NODE, BUILDKIT, HELM, DEVICE_PLUGIN, ADAPTER)


def binaries(group: Group, progress: Progress) -> Path:
    """Return the directory that holds the binaries of *group*, building them if their pins are new."""

    def build(directory: Path) -> None:
        go = host.go(group.module, progress)
        host.ensure(group.needs, progress)
        with progress.step(f"building {group.name} (once per version)"):
            for target in group.targets:
                _go_build(go, group.module, target, directory)

    return cache.publish(
        f"bin-{group.name}",
        group.key(),
        build,
        on_wait=lambda: progress.note(f"another process is building {group.name}; waiting for it"),
    )


def _go_build(go: str, module: Path, target: Target, directory: Path) -> None:
    command = [go, "build", "-ldflags", target.ldflags]
    if target.tags:
        command += ["-tags", target.tags]
    # With a trailing slash the output is a directory and every binary is named after its package.
    command += ["-o", str(directory / target.output) if target.output else f"{directory}/", *target.packages]
    run(contained(command), cwd=module, env={**host.go_environment(), "CGO_ENABLED": "1" if target.cgo else "0"}, timeout=3600)


def module_directory(group: Group, module: str, progress: Progress) -> Path:
    """Where the Go module cache keeps the source of *module* as pinned by *group*."""
    command = [host.go(group.module, progress), "list", "-m", "-f", "{{.Dir}}", module]
    result = run(command, cwd=group.module, env=host.go_environment(), timeout=600)
    path = Path(result.stdout.strip())
    if not path.is_dir():
        raise ClusterError(f"the Go module {module} is not in the module cache")
    return path


PROMETHEUS_OPERATOR: Final = "github.com/prometheus-operator/prometheus-operator"
KEDA: Final = "github.com/kedacore/keda/v2"


def source(name: str, module: str, progress: Progress) -> Path:
    """The source of a Go module of which only files are wanted and nothing is built; pinned in ``gomod/NAME``."""
    directory = _MODULES / name
    command = [host.go(directory, progress), "mod", "download", "-json", module]
    found = json.loads(run(command, cwd=directory, env=host.go_environment(), timeout=600).stdout)
    return Path(found["Dir"])


def monitoring_crds(progress: Progress) -> tuple[Path, ...]:
    """The Prometheus operator's CRDs for what the chart makes, out of its Go module (4 MB)."""
    directory = source("prometheus-operator", PROMETHEUS_OPERATOR, progress) / "example" / "prometheus-operator-crd"
    kinds = ("servicemonitors", "podmonitors", "prometheusrules")
    return tuple(directory / f"monitoring.coreos.com_{kind}.yaml" for kind in kinds)


def keda(progress: Progress) -> Path:
    """KEDA's source (2.5 MB): schema and scalers, against which the example is checked."""
    return source("keda", KEDA, progress)


def find(name: str, progress: Progress, groups: tuple[Group, ...] = GROUPS) -> Path:
    """The path of one binary, building its group if need be."""
    for group in groups:
        for target in group.targets:
            names = [target.output] if target.output else [os.path.basename(package) for package in target.packages]
            if name in names:
                return binaries(group, progress) / name
    raise ClusterError(f"no group builds {name}")
