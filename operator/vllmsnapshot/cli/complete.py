"""`kubectl_complete-vsnap`: kubectl calls it with the words after `kubectl vsnap`, the last one being typed.

It answers as cobra's completion does: a candidate per line with its help behind a tab, then `:4` (no file names).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import typer
from kubernetes.aio import config as kube_config

from ..kube import CONTENTS, SNAPSHOTS, Resource
from .app import app
from .cluster import Target, config_file, session
from .output import Format

NO_FILES = ":4"
PATIENCE_S = 2.0
"""Nobody waits longer for a completion."""

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
VALUES: dict[str, Resource] = {
    "snapshot": SNAPSHOTS,
    "snapshots": SNAPSHOTS,
    "snapshot_name": SNAPSHOTS,
    "content": CONTENTS,
    "contents": CONTENTS,
}
"""Names of arguments to what they name."""


def candidates(words: Sequence[str]) -> list[str]:
    """What may stand in the place of the last word."""
    *before, current = words or [""]
    command: Any = typer.main.get_command(app)
    target = {"kubeconfig": "", "context": "", "namespace": ""}
    pending: Any = None
    places = 0
    for word in before:
        if pending is not None:
            target |= {pending.name: word} if pending.name in target else {}
            pending = None
        elif word.startswith("-"):
            flag, has_value, value = word.partition("=")
            option = _option(command, flag)
            if option is not None and has_value:
                target |= {option.name: value} if option.name in target else {}
            elif option is not None and not option.is_flag:
                pending = option
        elif word in getattr(command, "commands", {}):
            command, places = command.commands[word], 0
        else:
            places += 1
    known = Target(**target)
    if pending is not None:
        return _start(current, _values(pending, known))
    if current.startswith("-"):
        return _start(
            current,
            [f"{name}\t{_help(p)}" for p in _options(command) for name in (*p.opts, *p.secondary_opts) if name.startswith("--")],
        )
    commands = getattr(command, "commands", {})
    if commands:
        return _start(current, [f"{name}\t{item.get_short_help_str(80)}" for name, item in commands.items() if not item.hidden])
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    argument = arguments[min(places, len(arguments) - 1)] if arguments else None
    if argument is None or (places >= len(arguments) and argument.nargs == 1):
        return []
    return _start(current, _names(VALUES[argument.name], known) if argument.name in VALUES else [])


def _start(current: str, found: Sequence[str]) -> list[str]:
    return [item for item in found if item.startswith(current)]


def _options(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]


def _option(command: Any, flag: str) -> Any:
    return next((p for p in _options(command) if flag in p.opts), None)


def _help(param: Any) -> str:
    return (getattr(param, "help", "") or "").splitlines()[0] if getattr(param, "help", "") else ""


def _values(option: Any, target: Target) -> list[str]:
    if option.name == "output":
        return [item.value for item in Format]
    if option.name == "namespace":
        return _names(NAMESPACES, target)
    if option.name == "context" and (path := config_file(target)):
        with contextlib.suppress(Exception):
            return [item["name"] for item in kube_config.list_kube_config_contexts(path)[0]]  # type: ignore[no-untyped-call]
    return []


def _names(resource: Resource, target: Target) -> list[str]:
    async def ask() -> list[str]:
        async with asyncio.timeout(PATIENCE_S), session(target) as open_session:
            found = await open_session.kube.list(resource, open_session.namespace if resource.namespaced else None)
            return sorted(item["metadata"]["name"] for item in found)

    try:
        return asyncio.run(ask())
    except Exception:  # a shell that is typed into is no place for errors
        return []


def main() -> None:
    """Entry point."""
    for line in candidates(sys.argv[1:]):
        sys.stdout.write(line + "\n")
    sys.stdout.write(NO_FILES + "\n")
