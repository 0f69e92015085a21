"""The commands of `kubectl vsnap`: flags in, text out. What is shown is decided in the modules beside this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from .. import __version__
from ..api import constants as c
from ..api.types import RecapturePhase, Toggle, VerificationOutcome
from ..kube import CONTENTS, NODES, PODS, SNAPSHOT_NODES, SNAPSHOTS, ApiError, Kube, Object
from ..world import Content, controlled_by
from . import artifacts, bench, describe, doctor, plot, status
from .cluster import Session, Target, session, until
from .errors import CliError, Exit, explain
from .output import Format, console, dump, plain, render, show, size, width_of

app = typer.Typer(
    name="kubectl vsnap",
    help="Looks after vLLM snapshots: status, timelines, artifacts, nodes, and what a restore is worth.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 all is well, 1 a problem was found, 2 wrong usage, 3 not found, 4 not permitted, 5 cluster not "
    "reachable, 6 timed out.",
)
artifact_app = typer.Typer(
    help="What is stored on the nodes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(artifact_app, name="artifacts")

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace; that of the context by default.", show_default=False)
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="All namespaces.")]
Context = Annotated[str, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
Kubeconfig = Annotated[str, typer.Option("--kubeconfig", help="Kubeconfig file; $KUBECONFIG by default.", show_default=False)]
Output = Annotated[Format, typer.Option("--output", "-o", help="Output format.", case_sensitive=False)]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Go on showing changes.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait.", min=1.0)]
SnapshotName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a VLLMSnapshot.", show_default=False)]


# --- running ---------------------------------------------------------------------------------------------------------


def fail(e: CliError) -> None:
    """One line on stderr."""
    text = Text("error: ", style="red")
    text.append(plain(str(e)), style="not red")
    console(stderr=True).print(text)


def run(target: Target, work: Callable[[Session], Awaitable[int | None]]) -> None:
    """Connect, work, end the program. A signal cancels the work, so that what it must undo is undone."""

    async def whole() -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, task.cancel)
        async with session(target) as opened:
            return await work(opened) or Exit.OK

    code: int = Exit.INTERRUPTED
    try:
        code = asyncio.run(whole())
    except CliError as e:
        fail(e)
        code = e.status
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    except BrokenPipeError:
        # Whoever read our output has seen enough. Nothing may be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = Exit.OK
    raise typer.Exit(code)


def note(text: str) -> None:
    """Progress, beside the output."""
    console(stderr=True).print(Text(plain(text)))


async def snapshot(opened: Session, name: str) -> Object:
    """The snapshot of that name; CliError if there is none."""
    try:
        found = await opened.kube.get(SNAPSHOTS, name, opened.namespace)
    except ApiError as e:
        raise explain(e) from e
    if found is None:
        # A kind that does not exist answers as an object that does not.
        await opened.kube.list(SNAPSHOTS, opened.namespace)
        raise CliError(Exit.NOT_FOUND, f"there is no VLLMSnapshot {name!r} in namespace {opened.namespace}")
    return found


async def captured(opened: Session, name: str) -> Object:
    """The snapshot of that name; CliError also if it is never captured."""
    found = await snapshot(opened, name)
    if ((found.get("spec") or {}).get("capture") or {}).get("policy") == Toggle.DISABLED:
        raise CliError(Exit.USAGE, f"{name} is not captured: spec.capture.policy is Disabled")
    return found


def request_id() -> str:
    """A value for an annotation that is new each time, and tells people when."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}-{secrets.token_hex(3)}"


def listed(items: Sequence[Object]) -> Object:
    """As kubectl prints several objects."""
    return {"apiVersion": "v1", "kind": "List", "items": [_clean(item) for item in items]}


def _clean(obj: Object) -> Object:
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "managedFields"}}


# --- status, describe ------------------------------------------------------------------------------------------------


@app.command("status")
def status_command(
    snapshots: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Only these.", show_default=False)] = None,
    output: Output = Format.TABLE,
    watch: Watch = False,
    all_namespaces: AllNamespaces = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """One line per snapshot: replicas, restored and cold, artifact, how long each way of starting took."""
    wanted = frozenset(snapshots or ())

    async def work(opened: Session) -> int | None:
        where = None if all_namespaces else opened.namespace
        found = await opened.kube.list(SNAPSHOTS, where)
        there = {item["metadata"]["name"] for item in found}
        if missing := sorted(wanted - there):
            raise CliError(Exit.NOT_FOUND, f"there is no VLLMSnapshot {missing[0]!r} in {where or 'any namespace'}")
        if watch:
            await follow(opened, where)
        elif output.structured:
            dump(listed([item for item in found if keep(item)]), output)
        elif not found:
            note(f"no VLLMSnapshots in {'any namespace' if where is None else f'namespace {where}'}")
        else:
            out = console()
            show(out, lines([item for item in found if keep(item)], width_of(out)))
        return None

    def keep(item: Object) -> bool:
        return not wanted or item["metadata"]["name"] in wanted

    def lines(items: Sequence[Object], width: int | None) -> list[Text]:
        return status.lines(items, time.time(), namespaces=all_namespaces, width=width, wide=output is Format.WIDE)

    async def follow(opened: Session, where: str | None) -> None:
        objects: dict[str, Object] = {}
        printed: dict[str, str] = {}
        out = console()
        with _live(out, output) as live:
            async for event in opened.kube.watch(SNAPSHOTS, where):
                if event.type == "SYNC":
                    objects = {item["metadata"]["uid"]: item for item in event.items if keep(item)}
                elif event.type == "DELETED":
                    objects.pop(event.object["metadata"]["uid"], None)
                elif keep(event.object):
                    objects[event.object["metadata"]["uid"]] = event.object
                if live is not None:
                    live.update(Group(*lines(list(objects.values()), out.width)), refresh=True)
                    continue
                for uid, item in objects.items():
                    # A line when what it says has changed; the head only once.
                    text = _document(item, output) if output.structured else lines([item], None)[1].plain
                    if printed.get(uid) != _version(item):
                        if not printed and not output.structured:
                            sys.stdout.write(lines([item], None)[0].plain + "\n")
                        sys.stdout.write(text + "\n")
                        sys.stdout.flush()
                        printed[uid] = _version(item)

    run(Target(kubeconfig, context, namespace), work)


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion"))


def _document(obj: Object, output: Format) -> str:
    """One object of a stream: a line of JSON, or a YAML document."""
    clean = _clean(obj)
    return json.dumps(clean, ensure_ascii=False) if output is Format.JSON else "---\n" + render(clean, output).rstrip()


def _live(out: Any, output: Format) -> Any:
    """A display that is drawn anew, on a terminal; None elsewhere."""
    if out.is_terminal and not output.structured:
        return Live(console=out, auto_refresh=False, screen=False, vertical_overflow="crop")
    return contextlib.nullcontext(None)


@app.command("describe")
def describe_command(
    snapshot_name: SnapshotName,
    output: Output = Format.TABLE,
    watch: Watch = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Everything about one snapshot: a timeline of each replica, why it is cold, and the artifacts."""

    async def gather(opened: Session) -> describe.Facts:
        obj = await snapshot(opened, snapshot_name)
        uid = obj["metadata"]["uid"]
        labels = f"{c.LABEL_SNAPSHOT_UID}={uid}"
        pods, contents = await asyncio.gather(
            opened.kube.list(PODS, opened.namespace, labels=labels),
            opened.allowed(opened.kube.list(CONTENTS, labels=labels)),
        )
        return describe.Facts(obj, [item for item in pods if controlled_by(item, uid)], contents)

    async def work(opened: Session) -> int | None:
        facts = await gather(opened)
        out = console()
        if output.structured:
            dump(describe.structured(facts), output)
        elif not watch:
            show(out, describe.lines(facts, time.time(), width=width_of(out)))
        else:
            await follow(opened, out)
        return None

    async def follow(opened: Session, out: Any) -> None:
        """Redraw when the snapshot changes: the operator writes its status after whatever happens to pods and artifacts."""
        last = ""
        with _live(out, output) as live:
            fields = f"metadata.name={snapshot_name}"
            async for event in opened.kube.watch(SNAPSHOTS, opened.namespace, fields=fields):
                if event.type == "DELETED":
                    raise CliError(Exit.NOT_FOUND, f"{snapshot_name} was deleted")
                made = describe.lines(await gather(opened), time.time(), width=width_of(out))
                if live is not None:
                    live.update(Group(*made), refresh=True)
                elif (text := "\n".join(line.plain for line in made)) != last:
                    last = text
                    sys.stdout.write(text + "\n\n")
                    sys.stdout.flush()

    run(Target(kubeconfig, context, namespace), work)


# --- artifacts -------------------------------------------------------------------------------------------------------


async def contents_of(opened: Session, all_namespaces: bool) -> list[Object]:
    """The contents of the namespace's snapshots, or all."""
    found = await opened.kube.list(CONTENTS)
    if all_namespaces:
        return found
    return [item for item in found if item["spec"]["snapshotRef"]["namespace"] == opened.namespace]


async def chosen(opened: Session, names: Sequence[str]) -> list[Object]:
    """Contents by their names; the name of a snapshot stands for its artifacts. CliError where nothing is called so."""
    found = await opened.kube.list(CONTENTS)
    made: dict[str, Object] = {}
    for name in names:
        exact = [item for item in found if item["metadata"]["name"] == name]
        mine = exact or [
            item
            for item in found
            if (item["spec"]["snapshotRef"]["namespace"], item["spec"]["snapshotRef"]["name"]) == (opened.namespace, name)
        ]
        if not mine:
            raise CliError(
                Exit.NOT_FOUND,
                f"{name!r} is neither an artifact nor a VLLMSnapshot with artifacts in namespace {opened.namespace}",
            )
        made |= {item["metadata"]["name"]: item for item in mine}
    return list(made.values())


@artifact_app.command("list")
def artifacts_list(
    output: Output = Format.TABLE,
    all_namespaces: AllNamespaces = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """The artifacts of the namespace's snapshots, and their state."""

    async def work(opened: Session) -> int | None:
        found = await contents_of(opened, all_namespaces)
        if output.structured:
            dump(listed(found), output)
            return None
        if not found:
            note("no artifacts")
            return None
        out = console()
        owners = {item["metadata"]["name"]: artifacts.owner(item) for item in found}
        items = [Content.parse(item) for item in found]
        show(out, artifacts.lines(items, time.time(), owners=owners, width=width_of(out), wide=output is Format.WIDE))
        return None

    run(Target(kubeconfig, context, namespace), work)


ContentNames = Annotated[
    list[str], typer.Argument(metavar="NAME", help="Artifacts, or snapshots for all of theirs.", show_default=False)
]


@artifact_app.command("inspect")
def artifacts_inspect(
    contents: ContentNames,
    output: Output = Format.TABLE,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Everything about an artifact: size, digest, phases of the capture, restores, environment."""

    async def work(opened: Session) -> int | None:
        found = await chosen(opened, contents)
        if output.structured:
            dump(listed(found) if len(found) > 1 else _clean(found[0]), output)
            return None
        out = console()
        for i, item in enumerate(found):
            show(out, [*([Text()] if i else []), *artifacts.inspect(item, time.time(), width=width_of(out))])
        return None

    run(Target(kubeconfig, context, namespace), work)


@artifact_app.command("verify")
def artifacts_verify(
    contents: ContentNames,
    timeout: Timeout = 600.0,
    output: Output = Format.TABLE,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Let the agents compute every digest again. A corrupt artifact is quarantined; replicas are not disturbed."""

    async def verify(kube: Kube, item: Object) -> Object:
        meta, request = item["metadata"], request_id()
        ours = {"name": meta["name"], "uid": meta["uid"], "annotations": {c.ANNOTATION_VERIFY: request}}
        await kube.apply(CONTENTS, {"metadata": ours}, c.MANAGER_CLI)

        def answer(obj: Object) -> Object | None:
            found = (obj.get("status") or {}).get("verification") or {}
            return found if found.get("request") == request else None

        made = await until(kube, CONTENTS, meta["name"], None, answer, timeout)
        if made is None:
            node = item["spec"]["nodeName"]
            raise CliError(
                Exit.TIMEOUT, f"{meta['name']}: no answer from the agent on node {node} in {timeout:.0f} s: kubectl vsnap doctor"
            )
        return {"content": meta["name"], "node": item["spec"]["nodeName"], **made}

    async def work(opened: Session) -> int | None:
        found = await chosen(opened, contents)
        idle = [item for item in found if not Content.parse(item).captured]
        asked = [item for item in found if item not in idle]
        for item in idle:
            note(f"{item['metadata']['name']} holds no artifact: {artifacts.state(Content.parse(item)).text}")
        if not asked:
            raise CliError(Exit.NOT_FOUND, "there is nothing to verify")
        note(f"verifying {len(asked)} on {', '.join(sorted({item['spec']['nodeName'] for item in asked}))}")
        results = await asyncio.gather(*(verify(opened.kube, item) for item in asked))
        if output.structured:
            dump(list(results), output)
        else:
            show(console(), [_verdict(item) for item in results])
        return Exit.OK if all(item["outcome"] == VerificationOutcome.INTACT for item in results) else Exit.PROBLEM

    run(Target(kubeconfig, context, namespace), work)


def _verdict(item: Object) -> Text:
    intact = item["outcome"] == VerificationOutcome.INTACT
    line = Text(f"{item['content']} on node {item['node']}: ")
    line.append(item["outcome"], style="green" if intact else "red")
    detail = (
        f"{item.get('files', 0)} files, {size(item.get('bytes', 0))} in {item['took']}" if intact else item.get("message") or ""
    )
    line.append(plain(f", {detail}" if detail else ""))
    return line


@artifact_app.command("gc")
def artifacts_gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would be removed, and what a full store would evict.")
    ] = False,
    retained: Annotated[
        bool, typer.Option("--retained", help="Also what was kept when its snapshot was deleted (deletionPolicy Retain).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: Output = Format.TABLE,
    all_namespaces: AllNamespaces = False,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Remove artifacts that nobody needs. The operator does so by itself, by the same rule, except for retained ones."""

    async def work(opened: Session) -> int | None:
        kube = opened.kube
        contents = await contents_of(opened, all_namespaces)
        where = None if all_namespaces else opened.namespace
        snapshots, pods, nodes, reports = await asyncio.gather(
            kube.list(SNAPSHOTS, where),
            kube.list(PODS, where, labels=f"{c.LABEL_MANAGED_BY}={c.MANAGED_BY},{c.LABEL_ROLE}={c.ROLE_REPLICA}"),
            opened.allowed(kube.list(NODES)),
            kube.list(SNAPSHOT_NODES),
        )
        found = artifacts.garbage(snapshots, contents, pods, nodes, reports)
        doomed = [item for item in found if retained or not item.retained]
        # What goes anyhow makes room anyhow.
        going = {item.content.name for item in found}
        after = (
            artifacts.next_to_go([x for x in contents if x["metadata"]["name"] not in going], pods, reports) if dry_run else []
        )
        if output.structured:
            first = [_garbage(item, removed=item in doomed and not dry_run) for item in found]
            dump([*first, *(_next(item) for item in after)], output)
        elif found:
            out = console()
            show(out, artifacts.garbage_lines(found, width=width_of(out)))
        else:
            note("nothing to remove")
        if after and not output.structured:
            out = console()
            head = Text("Where a store has no room for a capture, its agent evicts in this order:")
            show(out, [*([Text()] if found else []), head, *artifacts.next_lines(after, width=width_of(out))])
        if dry_run or not doomed:
            return None
        if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove {len(doomed)}?", err=True)):
            raise CliError(Exit.USAGE, "nothing was removed: pass --yes")
        for item in doomed:
            gone = await kube.delete(CONTENTS, item.content.name, uid=item.content.uid)
            note(f"{item.content.name}: {'removed' if gone else 'was gone already'}")
        return None

    run(Target(kubeconfig, context, namespace), work)


def _next(item: artifacts.Next) -> Object:
    return {
        "name": item.content,
        "node": item.node,
        "snapshot": item.owner,
        "why": item.why,
        "removed": False,
        "evictedInPlace": item.place,
    }


def _garbage(item: artifacts.Garbage, *, removed: bool) -> Object:
    content = item.content
    return {"name": content.name, "node": content.node, "snapshot": item.owner, "why": item.why, "removed": removed}


# --- recapture, doctor, bench ----------------------------------------------------------------------------------------


@app.command("recapture")
def recapture_command(
    snapshot_name: SnapshotName,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the new artifacts.")] = True,
    timeout: Timeout = 1800.0,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Take the artifacts of a snapshot again. The present ones are used until the new ones are on the disk."""

    async def work(opened: Session) -> int | None:
        obj = await captured(opened, snapshot_name)
        if not (obj.get("spec") or {}).get("replicas", 1):
            note(f"{snapshot_name} has 0 replicas: it is captured again when it is scaled up")
        request, meta = request_id(), obj["metadata"]
        ours = {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]}
        await opened.kube.apply(
            SNAPSHOTS, {"metadata": {**ours, "annotations": {c.ANNOTATION_RECAPTURE: request}}}, c.MANAGER_CLI
        )
        note(f"asked for (request {request})")
        if not wait:
            return None
        last = ""

        def check(item: Object) -> Object | None:
            nonlocal last
            found = (item.get("status") or {}).get("recapture") or {}
            if found.get("request") != request:
                return None
            text = f"{found['phase']}: {found.get('message', '')}"
            if text != last:
                last = text
                note(text)
            return dict(found) if found["phase"] in (RecapturePhase.DONE, RecapturePhase.FAILED) else None

        made = await until(opened.kube, SNAPSHOTS, snapshot_name, opened.namespace, check, timeout)
        if made is None:
            what = "the request stands" if last else "the operator took no notice: kubectl vsnap doctor"
            raise CliError(Exit.TIMEOUT, f"not done in {timeout:.0f} s; {what}")
        return Exit.OK if made["phase"] == RecapturePhase.DONE else Exit.PROBLEM

    run(Target(kubeconfig, context, namespace), work)


@app.command("doctor")
def doctor_command(
    output: Output = Format.TABLE,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Examine cluster, nodes and snapshots; each failed check comes with its remedy."""

    async def work(opened: Session) -> int | None:
        found = await doctor.examine(opened.kube, opened.namespace)
        if output.structured:
            dump(doctor.structured(found), output)
        else:
            show(console(), doctor.lines(found))
        return Exit.PROBLEM if any(item.level == "Fail" for item in found) else Exit.OK

    run(Target(kubeconfig, context, namespace), work)


@app.command("bench")
def bench_command(
    snapshot_name: SnapshotName,
    runs: Annotated[int, typer.Option("--runs", help="Restored starts.", min=1, max=100)] = 3,
    cold_runs: Annotated[int, typer.Option("--cold-runs", help="Cold starts without a capture.", min=0, max=100)] = 1,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot (.svg).", show_default=False, dir_okay=False)
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for one start.", min=1.0)] = 1800.0,
    output: Output = Format.TABLE,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Measure cold against restored starts on a temporary copy. It needs room for one more replica."""
    if plot_file is not None and plot_file.suffix.lower() != ".svg":
        raise typer.BadParameter("the plot is an SVG: choose a name that ends in .svg", param_hint="--plot")

    async def work(opened: Session) -> int | None:
        obj = await captured(opened, snapshot_name)
        found = await bench.run(opened.kube, obj, bench.Options(runs, cold_runs, timeout), note)
        if output.structured:
            dump(bench.structured(snapshot_name, found), output)
        else:
            out = console()
            show(out, bench.lines(found, width=width_of(out)))
        if plot_file is not None:
            try:
                plot_file.write_text(plot.svg(f"{snapshot_name}: pod creation to serving", found))
            except OSError as e:
                raise CliError(Exit.USAGE, f"{plot_file} cannot be written: {e.strerror}") from e
        return None

    run(Target(kubeconfig, context, namespace), work)


# --- program ---------------------------------------------------------------------------------------------------------


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"{__version__}\n")
        raise typer.Exit(Exit.OK)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """See `app`."""


def main() -> None:
    """Entry point of `kubectl-vsnap`."""
    # Warnings of libraries are no output of ours; what matters comes as an error.
    logging.disable(logging.CRITICAL)
    app(prog_name="kubectl vsnap")


if __name__ == "__main__":
    main()
