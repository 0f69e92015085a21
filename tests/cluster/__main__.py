"""Command line of the local cluster: ``python -m tests.cluster COMMAND``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import build, cache
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--name", default="dev", help="name of the cluster (default: dev); several may be up at once")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Accepted on both sides of the command; SUPPRESS keeps the inner one from resetting the outer one.
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    up = commands.add_parser("up", parents=[named], help="start the cluster")
    up.add_argument("--mode", choices=("node", "controlplane"), default="node", help="with a node (default) or without")
    up.add_argument("--gpus", type=int, default=0, metavar="N", help="with N fake GPUs, which pods can ask for")
    up.add_argument("--fresh", action="store_true", help="start anew even if it is up and healthy")
    commands.add_parser("down", parents=[named], help="remove every trace of it (images stay in the cache)")
    commands.add_parser("status", parents=[named], help="tell what is up; exit status 1 if it is not healthy")
    commands.add_parser("env", parents=[named], help="print shell exports; they are of use inside `run`")
    for name, text in (
        ("kubectl", "run kubectl as administrator"),
        ("helm", "run Helm as administrator"),
        ("run", "run a command in the cluster's network, mounts and PIDs"),
    ):
        command = commands.add_parser(name, help=text, add_help=False, prefix_chars="\0")
        command.add_argument("arguments", nargs=argparse.REMAINDER)
    load = commands.add_parser("load-image", parents=[named], help="import OCI archives, or images of `build-images`")
    load.add_argument("images", nargs="+", metavar="TAR|NAME")
    images = commands.add_parser("build-images", parents=[named], help="build images with BuildKit")
    images.add_argument("images", nargs="*", metavar="NAME", help="operator, child, engine (default: all)")
    images.add_argument("--load", action="store_true", help="import them into the cluster")
    prepare = commands.add_parser("prepare", parents=[named], help="build everything that is cached")
    prepare.add_argument("--binaries-only", action="store_true", help="only what `up` needs, no images and no model")
    return parser


def _exec(command: list[str]) -> None:
    sys.stdout.flush()
    os.execvp(command[0], command)


def _status(cluster: Cluster) -> int:
    try:
        pid = cluster.pid
    except ClusterError as error:
        print(error)
        return 1
    healthy = cluster.healthy()
    print(f"cluster {cluster.name} ({cluster.mode}): {'healthy' if healthy else 'NOT healthy'}, init PID {pid}")
    for daemon, state in cluster.daemons().items():
        print(f"  {daemon:26}{state}")
    print(f"  KUBECONFIG={cluster.kubeconfig}\n  logs: {cluster.logs_dir}")
    return 0 if healthy else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(argv)
    progress = Progress()
    try:
        return _run(options, progress)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, progress: Progress) -> int:
    command: str = options.command
    cluster = Cluster(options.name, getattr(options, "mode", "node"), gpus=getattr(options, "gpus", 0), progress=progress)
    if command == "up":
        cluster.up(fresh=options.fresh)
    elif command == "down":
        cluster.down()
        progress.note(f"cluster {cluster.name!r} is down")
    elif command == "status":
        return _status(cluster)
    elif command == "env":
        for name, value in cluster.environment().items():
            print(f"export {name}={shlex.quote(value)}")
    elif command == "kubectl":
        _exec(cluster.kubectl_command(*options.arguments))
    elif command == "helm":
        _exec(cluster.helm_command(*options.arguments))
    elif command == "run":
        _exec(cluster.exec_command(options.arguments or [os.environ.get("SHELL", "/bin/sh")]))
    elif command == "load-image":
        _load(cluster, options.images, progress)
    elif command == "build-images":
        from tests.cluster import images

        for image in images.build_all(options.images or images.NAMES, progress):
            print(f"{image.reference} {image.digest}")
            if options.load:
                cluster.load_image(image)
    elif command == "prepare":
        _prepare(options.binaries_only, progress)
    return 0


def _load(cluster: Cluster, names: Sequence[str], progress: Progress) -> None:
    from tests.cluster import images

    for name in names:
        if Path(name).is_file():
            cluster.load_image(Path(name))
        else:
            for image in images.build_all([name], progress):
                cluster.load_image(image)


def _prepare(binaries_only: bool, progress: Progress) -> None:
    for group in build.GROUPS:
        build.binaries(group, progress)
    if not binaries_only:
        from tests.cluster import criu, images, model, monitoring

        images.build_all(images.NAMES, progress)
        criu.build(progress)
        model.smollm2(progress)
        monitoring.prepare(progress)
    progress.note(f"everything is in {cache.cache_root()}")


if __name__ == "__main__":
    sys.exit(main())
