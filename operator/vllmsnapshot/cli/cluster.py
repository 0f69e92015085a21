"""Which cluster and namespace: flags first, then the kubeconfig as kubectl finds it, then the pod's own service account."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from kubernetes.aio import config as kube_config

from ..kube import ApiError, Kube, Object, Resource
from .errors import CliError, Exit, explain

T = TypeVar("T")

ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Target:
    """What the flags say; empty: not said."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""


@dataclass(frozen=True)
class Session:
    """An open connection, and the namespace that names are looked up in."""

    kube: Kube
    namespace: str
    context: str = ""

    async def allowed(self, doing: Awaitable[T]) -> T | None:
        """What a request gives, or None where the caller has no right to it."""
        try:
            return await doing
        except ApiError as e:
            if e.status == 403:
                return None
            raise


def config_file(target: Target) -> str | None:
    """The kubeconfig, or None where there is none and only a service account can be used."""
    path = target.kubeconfig or os.environ.get("KUBECONFIG") or ""
    default = Path.home() / ".kube" / "config"
    return path or (str(default) if default.exists() else None)


def _exists(path: str) -> bool:
    """$KUBECONFIG may name several files; one is enough."""
    return any(os.path.exists(os.path.expanduser(item)) for item in path.split(os.pathsep))


def _account_namespace() -> str:
    try:
        return ACCOUNT_NAMESPACE.read_text().strip()
    except OSError:
        return ""


@contextlib.asynccontextmanager
async def session(target: Target) -> AsyncIterator[Session]:
    """Connect. Raises CliError where nothing says how; ApiErrors inside become CliErrors."""
    path = config_file(target)
    context, namespace = target.context, target.namespace
    try:
        if path is not None:
            if not _exists(path):
                raise CliError(Exit.USAGE, f"there is no kubeconfig {path}")
            contexts, active = kube_config.list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
            if context:
                active = next((item for item in contexts if item["name"] == context), None)
                if active is None:
                    raise CliError(Exit.USAGE, f"there is no context {context!r} in {path}")
            context = active["name"]
            namespace = namespace or active["context"].get("namespace") or ""
        elif "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise CliError(Exit.USAGE, "no cluster is configured: set KUBECONFIG or pass --kubeconfig")
        else:
            namespace = namespace or _account_namespace()
        kube = await Kube.connect(path, context or None)
    except (kube_config.ConfigException, yaml.YAMLError, OSError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise CliError(Exit.USAGE, f"the kubeconfig {path or '(none)'} cannot be used: {e}") from e
    try:
        async with kube:
            yield Session(kube, namespace or "default", context)
    except ApiError as e:
        raise explain(e) from e


async def until(
    kube: Kube,
    resource: Resource,
    name: str,
    namespace: str | None,
    check: Callable[[Object], T | None],
    timeout_s: float,
) -> T | None:
    """Follow one object until `check` gives something; None when the time is up. CliError if it is deleted meanwhile."""

    async def follow() -> T:
        async with contextlib.aclosing(kube.watch(resource, namespace, fields=f"metadata.name={name}")) as events:  # type: ignore[type-var]
            async for event in events:
                if event.type == "DELETED" or (event.type == "SYNC" and not event.items):
                    raise CliError(Exit.NOT_FOUND, f"{resource.kind} {name} was deleted")
                for obj in event.items if event.type == "SYNC" else (event.object,):
                    found = check(obj)
                    if found is not None:
                        return found
        raise AssertionError("a watch has no end")

    try:
        async with asyncio.timeout(timeout_s):
            return await follow()
    except TimeoutError:
        return None
