"""CRIU's log is bounded, its errors come through, and the helper that enters containers is careful."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllmsnapshot.agent import criu as module
from vllmsnapshot.agent import nsrun
from vllmsnapshot.agent.criu import COMMON, Criu, CriuError, Log


def test_a_short_log_is_kept_whole() -> None:
    log = Log()
    log.feed(b"one\ntw")
    log.feed(b"o\n")
    assert log.text == "one\ntwo\n"
    assert log.errors() == "one; two"


def test_a_log_of_any_length_takes_the_same_room() -> None:
    log = Log(head=100, tail=200)
    log.feed(b"begin\n")
    for n in range(20_000):
        log.feed(b"line %d of many\n" % n)
    log.feed(b"end\n")
    assert log.bytes > 300_000
    assert len(log.text) < 400
    assert log.text.startswith("begin\n")
    assert log.text.endswith("end\n")
    assert "bytes left out" in log.text


def test_errors_are_found_wherever_they_are() -> None:
    log = Log(head=10, tail=10)
    log.feed(b"(00.01) Error (criu/a.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n")
    log.feed(b"(00.02) Warn  (criu/b.c:2): odd\n(00.03) Err")
    log.feed(b"or (criu/c.c:3): Can't open file x\n" + b"debug\n" * 1000)
    log.feed(b"(00.09) Error (criu/d.c:4): no newline at the end")
    assert log.errors() == "(00.03) Error (criu/c.c:3): Can't open file x; (00.09) Error (criu/d.c:4): no newline at the end"


def test_a_line_without_end_takes_no_room() -> None:
    log = Log()
    for _ in range(100):
        log.feed(b"Error " + b"x" * 10_000)
    assert len(log.errors()) < 1000


def test_no_file_of_the_container_configures_criu() -> None:
    assert "--no-default-config" in COMMON
    assert COMMON[COMMON.index("-L") + 1].startswith("/proc/self/fd/"), "plugins come from the prefix"
    assert nsrun.ENVIRONMENT["HOME"] == "/nonexistent"
    assert not any(name.startswith("LD_") for name in nsrun.ENVIRONMENT)


def test_a_missing_criu_is_said() -> None:
    with pytest.raises(CriuError, match="there is no criu"):
        Criu(prefix=Path("/nonexistent")).version()
    with pytest.raises(CriuError, match="cannot be run"):
        Criu(prefix=Path("/nonexistent")).check()


def test_the_helper_imports_nothing_inside_a_container() -> None:
    """After `main` has emptied sys.path an import would fail; before, it could be answered by a workload's file."""
    tree = ast.parse(Path(nsrun.__file__).read_text())
    inside = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
    assert not [n for n in inside if isinstance(n, ast.Import | ast.ImportFrom)]


def test_the_helper_needs_the_standard_library_only() -> None:
    """It runs without site-packages."""
    path = module._python_path(Path(module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sys, vllmsnapshot.agent.nsrun; print('pydantic' in sys.modules)"],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_the_loader_forgets_the_preload_file(tmp_path: Path) -> None:
    loader = tmp_path / nsrun.LOADER
    loader.parent.mkdir(parents=True)
    loader.write_bytes(b"ELF...\0/etc/ld.so.preload\0...")
    prefix = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        copy = nsrun._loader(prefix)
        with open(copy, "rb") as f:
            f.seek(0)
            code = f.read()
        assert code == b"ELF...\0" + b"\0" * 19 + b"..."
        loader.write_bytes(b"another libc")
        with pytest.raises(RuntimeError, match="does not look like"):
            nsrun._loader(prefix)
    finally:
        os.close(prefix)
