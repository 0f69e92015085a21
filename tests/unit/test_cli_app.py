"""The program `kubectl vsnap`: arguments, exit statuses, one clear line per error, completion, rights. The cluster is in
tests/controlplane/test_cli.py."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.chart import ROOT, render
from tests.unit.cliobjects import content, snapshot
from tests.unit.test_chart import VERBS, calls
from vllmsnapshot import __version__
from vllmsnapshot.api import constants as c
from vllmsnapshot.cli import app as program
from vllmsnapshot.cli import complete
from vllmsnapshot.cli.cluster import Session, Target
from vllmsnapshot.cli.errors import Exit, explain
from vllmsnapshot.kube import ApiError, Resource


def call(*args: str, env: dict[str, str] | None = None, stdin: str | None = None) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    result = CliRunner().invoke(
        program.app, list(args), env={"KUBECONFIG": "", "HOME": "/nonexistent", **(env or {})}, input=stdin
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Commands:"),
        (["frobnicate"], "No such command"),
        (["describe"], "Missing argument 'NAME'"),
        (["status", "-o", "xml"], "not one of"),
        (["status", "--no-such"], "No such option"),
        (["bench", "x", "--runs", "0"], "runs"),
        (["bench", "x", "--plot", "x.png"], "ends in .svg"),
        (["artifacts", "verify"], "Missing argument 'NAME'"),
        (["artifacts", "verify", "x", "--timeout", "0"], "timeout"),
        (["status"], "no cluster is configured"),
        (["status", "--kubeconfig", "/nonexistent/config"], "there is no kubeconfig /nonexistent/config"),
        (["status", "--kubeconfig", "/dev/null"], "the kubeconfig /dev/null cannot be used"),
    ],
)
def test_wrong_usage_is_status_2_and_says_what_is_wrong(args: list[str], said: str) -> None:
    status, out, err = call(*args)
    assert (status, said in out + err) == (Exit.USAGE, True), out + err
    assert "Traceback" not in out + err


def kubeconfig(path: Path, server: str) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "k", "user": "u", "namespace": "models"}}],
        "clusters": [{"name": "k", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_an_api_server_that_cannot_be_reached_is_status_5(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        path = kubeconfig(tmp_path / "config", f"http://127.0.0.1:{closed.getsockname()[1]}")
        for command in (["status"], ["describe", "x"], ["doctor"], ["artifacts", "list"], ["recapture", "x"], ["bench", "x"]):
            status, out, err = call(*command, env={"KUBECONFIG": path})
            assert (status, out) == (Exit.UNREACHABLE, ""), command
            assert err.startswith("error: the API server cannot be reached"), err
            assert err.count("\n") == 1, "one line"


def test_an_unknown_context_is_wrong_usage(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    assert call("status", "--context", "there", "--kubeconfig", path)[0] == Exit.USAGE


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ApiError(0, "TransportError", "refused"), Exit.UNREACHABLE, "--context"),
        (ApiError(401, "Unauthorized", ""), Exit.DENIED, "log in again"),
        (ApiError(403, "Forbidden", 'pods is forbidden: User "u" cannot list'), Exit.DENIED, 'User "u" cannot list'),
        (ApiError(404, "", "404 page not found"), Exit.NOT_FOUND, "install the chart"),
        (ApiError(409, "Conflict", "x"), Exit.PROBLEM, "try again"),
        (ApiError(422, "Invalid", "x"), Exit.PROBLEM, "refused"),
        (ApiError(429, "TooManyRequests", "x"), Exit.UNREACHABLE, "try again later"),
        (ApiError(503, "ServiceUnavailable", "a\nb"), Exit.UNREACHABLE, "a b"),
    ],
)
def test_every_answer_of_the_api_server_becomes_a_line_with_a_remedy(error: ApiError, status: Exit, said: str) -> None:
    made = explain(error)
    assert made.status == status
    assert said in str(made)
    assert "\n" not in str(made)


# --- with a cluster of three answers ---------------------------------------------------------------------------------


class Answers:
    """The calls of the commands, answered from memory; the real API server is in tests/controlplane/test_cli.py."""

    def __init__(self, *objects: dict[str, Any], denied: tuple[str, ...] = ()) -> None:
        self.objects = objects
        self.denied = denied
        self.wrote: list[tuple[str, dict[str, Any]]] = []

    async def list(self, resource: Resource, _namespace: str | None = None, **_: Any) -> list[dict[str, Any]]:
        if resource.plural in self.denied:
            raise ApiError(403, "Forbidden", f"{resource.plural} is forbidden")
        return [item for item in self.objects if item["kind"] == resource.kind]

    async def get(self, resource: Resource, name: str, _namespace: str | None = None) -> dict[str, Any] | None:
        return next((x for x in await self.list(resource) if x["metadata"]["name"] == name), None)

    async def apply(self, resource: Resource, obj: dict[str, Any], manager: str, **_: Any) -> dict[str, Any]:
        assert manager == c.MANAGER_CLI
        self.wrote.append((resource.plural, obj))
        return obj

    async def delete(self, resource: Resource, name: str, _namespace: str | None = None, *, uid: str | None = None) -> bool:
        self.wrote.append((f"delete {resource.plural}", {"name": name, "uid": uid}))
        return True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*objects: dict[str, Any], denied: tuple[str, ...] = ()) -> Answers:
        answers = Answers(*objects, denied=denied)

        @contextlib.asynccontextmanager
        async def session(target: Target) -> AsyncIterator[Session]:
            try:
                yield Session(answers, target.namespace or "default")  # type: ignore[arg-type]
            except ApiError as e:
                raise explain(e) from e

        monkeypatch.setattr(program, "session", session)
        return answers

    return use


def test_status_and_its_formats(cluster: Any) -> None:
    cluster(snapshot(), snapshot("other"))
    status, out, err = call("status")
    assert (status, err) == (Exit.OK, "")
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "other", "smol"]
    assert "\x1b" not in out
    assert yaml.safe_load(call("status", "smol", "-o", "json")[1])["items"][0]["metadata"]["name"] == "smol"
    assert len(yaml.safe_load(call("status", "-o", "yaml")[1])["items"]) == 2
    assert call("status", "smol", "missing")[0] == Exit.NOT_FOUND


def test_nothing_there_is_no_error_and_no_output(cluster: Any) -> None:
    cluster()
    assert call("status") == (Exit.OK, "", "no VLLMSnapshots in namespace default\n")
    assert call("artifacts", "list")[:2] == (Exit.OK, "")
    assert call("artifacts", "gc")[:2] == (Exit.OK, "")
    status, _, err = call("describe", "smol")
    assert status == Exit.NOT_FOUND
    assert "no VLLMSnapshot 'smol' in namespace default" in err


def test_who_may_not_see_contents_sees_the_rest(cluster: Any) -> None:
    cluster(snapshot(), denied=("vllmsnapshotcontents",))
    assert "you may not list vllmsnapshotcontents" in call("describe", "smol")[1]
    assert call("status")[0] == Exit.OK
    status, _, err = call("artifacts", "list")
    assert status == Exit.DENIED
    assert "vllmsnapshotcontents is forbidden" in err


def test_recapture_asks_with_a_new_value_each_time(cluster: Any) -> None:
    answers = cluster(snapshot())
    for _ in range(2):
        assert call("recapture", "smol", "--no-wait")[0] == Exit.OK
    values = [obj["metadata"]["annotations"][c.ANNOTATION_RECAPTURE] for _, obj in answers.wrote]
    assert len(set(values)) == 2
    assert {tuple(obj["metadata"]) for _, obj in answers.wrote} == {("name", "namespace", "uid", "annotations")}


@pytest.mark.parametrize("command", ["recapture", "bench"])
def test_what_is_never_captured_is_refused(cluster: Any, command: str) -> None:
    off = snapshot()
    off["spec"]["capture"] = {"policy": "Disabled"}
    answers = cluster(off)
    status, _, err = call(command, "smol")
    assert (status, "spec.capture.policy is Disabled" in err) == (Exit.USAGE, True)
    assert answers.wrote == []


def test_gc_removes_nothing_unasked_and_never_what_was_retained_on_purpose(cluster: Any) -> None:
    node = {"kind": "Node", "metadata": {"name": "node-a"}}
    made = (content("new", age=1.0), content("old"), content("kept", owner="uid-gone"), snapshot(), node)
    answers = cluster(*made)
    status, out, _ = call("artifacts", "gc", "--dry-run")
    assert status == Exit.OK
    assert [line.split()[0] for line in out.splitlines() if line] == ["NAME", "kept", "old", "Where", "NODE", "node-a"]
    assert out.splitlines()[-1].split()[1:3] == ["1", "new"]
    assert call("artifacts", "gc")[0] == Exit.USAGE, "nobody is there to be asked"
    assert answers.wrote == []
    assert call("artifacts", "gc", "--yes")[0] == Exit.OK
    assert answers.wrote == [("delete vllmsnapshotcontents", {"name": "old", "uid": "uid-old"})]
    answers.wrote.clear()
    assert call("artifacts", "gc", "--yes", "--retained")[0] == Exit.OK
    assert {obj["name"] for _, obj in answers.wrote} == {"old", "kept"}


def test_verify_and_inspect_take_artifacts_and_snapshots(cluster: Any) -> None:
    cluster(content("one"), content("two"), snapshot())
    assert call("artifacts", "inspect", "one")[1].count("Name:") == 1
    assert call("artifacts", "inspect", "smol")[1].count("Name:") == 2
    assert call("artifacts", "inspect", "three")[0] == Exit.NOT_FOUND
    cluster(content("order", kind="Ordered"))
    status, _, err = call("artifacts", "verify", "order")
    assert status == Exit.NOT_FOUND
    assert "order holds no artifact: Ordered" in err


# --- the program -----------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    code = "from vllmsnapshot.cli.app import main; import sys; sys.argv = ['x', '--help']; main()"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    assert "recapture" in made.stdout
    assert call("--version") == (0, f"{__version__}\n", "")


def test_entry_points_are_named_as_kubectl_looks_for_them() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-vsnap"] == "vllmsnapshot.cli.app:main"
    assert scripts["kubectl_complete-vsnap"] == "vllmsnapshot.cli.complete:main"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], ["status", "describe", "recapture", "doctor", "bench", "artifacts"]),
        (["d"], ["describe", "doctor"]),
        (["artifacts", ""], ["list", "inspect", "verify", "gc"]),
        (["status", "-o", ""], ["table", "wide", "json", "yaml"]),
        (["status", "--output", "y"], ["yaml"]),
        (["recapture", "--no-w"], ["--no-wait"]),
        (["artifacts", "gc", "--d"], ["--dry-run"]),
        (["doctor", ""], []),
    ],
)
def test_completion(words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    assert sorted(item.partition("\t")[0] for item in complete.candidates(words)) == sorted(expected)


def test_completion_of_names_looks_where_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Target]] = []

    def names(resource: Resource, target: Target) -> list[str]:
        asked.append((resource.plural, target))
        return ["smol", "other"]

    monkeypatch.setattr(complete, "_names", names)
    assert complete.candidates(["describe", "-n", "models", "--context=prod", "s"]) == ["smol"]
    assert asked == [("vllmsnapshots", Target(context="prod", namespace="models"))]
    assert complete.candidates(["describe", "smol", ""]) == [], "it takes one name"
    assert complete.candidates(["artifacts", "verify", "a", ""]) == ["smol", "other"], "and this many"
    assert asked[-1][0] == "vllmsnapshotcontents"


def test_completion_without_a_cluster_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-vsnap", "describe", ""])
    complete.main()
    assert capsys.readouterr() == (":4\n", "")


def test_users_may_do_what_the_commands_do() -> None:
    """The roles for users together allow every call on our own kinds, and nothing is granted that only machines need."""
    roles = [o for o in render({}) if o["kind"] == "ClusterRole" and o["metadata"]["labels"][c.LABEL_COMPONENT] == "user"]
    assert len(roles) == 4
    granted = {
        (resource, verb)
        for role in roles
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if c.GROUP in rule["apiGroups"]
    }
    used = {(resource, verb) for group, resource, verb in calls("cli") if group == c.GROUP}
    used |= {("vllmsnapshots/scale", "patch")}  # bench scales its copy
    assert {("vllmsnapshots", "patch"), ("vllmsnapshotcontents", "patch"), ("vllmsnapshotcontents", "delete")} <= used
    assert used <= granted
    assert not [right for right in granted if right[0].endswith("/status") and right[1] not in VERBS["list"] + ("get", "watch")]


def test_the_page_lists_every_command_and_status_and_every_option_has_a_help() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    group = typer.main.get_command(program.app)
    commands = {**group.commands, **{f"artifacts {k}": v for k, v in group.commands["artifacts"].commands.items()}}  # type: ignore[attr-defined]
    del commands["artifacts"]
    for name, command in commands.items():
        assert f"| `{name}" in page, name
        for option in (p for p in command.params if p.param_type_name == "option"):
            assert option.help, (name, option.name)
    for status in Exit:
        assert f"| {status.value} |" in page, status
