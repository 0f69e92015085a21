"""The operator as PID 1 of its container, before it is up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.chart import ROOT
from tests.unit.child_harness import first_in, in_a_namespace, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a PID namespace needs root")


def deployed() -> list[str]:
    """The operator's command as the manifests have it."""
    objects = yaml.safe_load_all((ROOT / "deploy/manifests/install.yaml").read_text())
    (deployment,) = (o for o in objects if o and o["kind"] == "Deployment")
    command: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    return command


def test_the_images_own_command_is_the_deployed_one() -> None:
    (line,) = (v for v in (ROOT / "Dockerfile.operator").read_text().splitlines() if v.startswith("CMD "))
    assert json.loads(line.removeprefix("CMD ")) == deployed()


def test_sigterm_before_it_is_up_ends_it(tmp_path: Path) -> None:
    """The kernel drops what PID 1 neither handles nor blocks, and nobody sends it again."""
    begun, gate, config, log = (tmp_path / name for name in ("begun", "gate", "kubeconfig", "log"))
    os.mkfifo(gate)
    start = tmp_path / "vllmsnapshot-operator"
    # Both commands are of the shell itself: dash unblocks all signals when it has waited for a child.
    start.write_text(f'#!/bin/sh\n: >{begun}; read _ <{gate}\nexec {sys.executable} -m vllmsnapshot.controller.app "$@"\n')
    start.chmod(0o755)
    server = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}  # it is not asked, or nobody answers
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    user = {"name": "none", "user": {"token": "none"}}
    config.write_text(json.dumps({"clusters": [server], "contexts": [context], "users": [user], "current-context": "none"}))
    options = ("--kubeconfig", str(config), "--health-port", "0")
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with log.open("wb") as out, gate.open("r+b", buffering=0) as opened:
        argv = in_a_namespace(*deployed(), *options)
        with subprocess.Popen(argv, env=env, stdout=out, stderr=out) as launcher:
            try:
                pid = first_in(launcher.pid)
                until(begun.exists, "the interpreter's start")
                os.kill(pid, signal.SIGTERM)
                opened.write(b"go\n")
                assert launcher.wait(120) == 0, log.read_text()
            finally:
                launcher.kill()
