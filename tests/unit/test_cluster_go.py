"""The Go toolchain that builds the local cluster: the machine's own if it is new enough, else the pinned one from PyPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import host
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "go.mod").write_text("module m\n\ngo 1.26.8\n")
    return tmp_path


def program(directory: Path, version: str) -> Path:
    path = directory / "go"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho go{version}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("installed", "own"), [("1.26.8", True), ("1.27.0", True), ("1.26.7", False), ("1.19.8", False)])
def test_an_old_toolchain_of_the_machine_is_not_used(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, own: bool
) -> None:
    machines = program(tmp_path / "machine", installed)
    pinned = program(tmp_path / "pinned" / "go" / "bin", "1.27.3")
    monkeypatch.setenv("PATH", str(machines.parent), prepend=":")
    monkeypatch.setattr(host, "from_pypi", lambda *_: tmp_path / "pinned")
    assert host.go(module, Progress(quiet=True)) == str(machines if own else pinned)


def test_a_pinned_toolchain_older_than_the_module_says_so(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "pinned" / "go" / "bin", "1.25.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "from_pypi", lambda *_: tmp_path / "pinned")
    with pytest.raises(ClusterError, match=r"Go 1\.26\.8 or newer"):
        host.go(module, Progress(quiet=True))
