"""The seccomp profile: as a file, and as a filter of the kernel's that a process has to live with."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllmsnapshot.agent import config, seccomp
from vllmsnapshot.agent.local import LocalOps

APPLY = """
# Loads the profile as a runtime does, by libseccomp, then tries calls: name -> 0, or the error's number.
import ctypes, errno, json, os, socket, subprocess, sys, threading

class Arg(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]

lib, libc = ctypes.CDLL("libseccomp.so.2"), ctypes.CDLL(None, use_errno=True)
lib.seccomp_init.restype = ctypes.c_void_p
profile = json.load(open(sys.argv[1]))
assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
filter = ctypes.c_void_p(lib.seccomp_init(0x7FFF0000))
OPS = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
for rule in profile["syscalls"]:
    assert rule["action"] == "SCMP_ACT_ERRNO"
    args = [Arg(x["index"], OPS[x["op"]], x["value"], x.get("valueTwo", 0)) for x in rule.get("args", [])]
    for name in rule["names"]:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number == -1:
            print("unknown", name, file=sys.stderr)  # a runtime skips it too
            continue
        array = (Arg * len(args))(*args)
        code = lib.seccomp_rule_add_array(filter, ctypes.c_uint32(0x00050000 | rule["errnoRet"]), number, len(args), array)
        assert code == 0, (name, code)
assert lib.seccomp_load(filter) == 0

def call(name, *args):
    result = libc.syscall(lib.seccomp_syscall_resolve_name(name.encode()), *args)
    return ctypes.get_errno() if result < 0 else 0

found = {name: call(name, *args) for name, args in {
    "io_uring_setup": (1, 0), "io_uring_enter": (0, 0, 0, 0, 0, 0), "io_uring_register": (0, 0, 0, 0), "clone3": (0, 0),
    "mount": (0, 0, 0, 0, 0), "unshare": (0x10000000,), "setns": (0, 0), "bpf": (0, 0, 0),
    "getppid": (), "umask": (0o22,),
}.items()}
for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000):
    found[f"clone {flag:#x}"] = call("clone", flag | 17, 0, 0, 0, 0)
for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_ALG, socket.AF_VSOCK):
    try:
        socket.socket(family, socket.SOCK_SEQPACKET if family == socket.AF_ALG else socket.SOCK_STREAM).close()
        found[family.name] = 0
    except OSError as e:
        found[family.name] = e.errno
# What an engine does all the time.
thread = threading.Thread(target=found.setdefault, args=("thread", 0))
thread.start()
thread.join()
found["process"] = subprocess.run(["/bin/true"]).returncode
pid = os.fork()
if not pid:
    os._exit(0)
found["fork"] = os.waitpid(pid, 0)[1]
print(json.dumps(found))
"""


def test_a_process_under_the_profile(tmp_path: Path) -> None:
    seccomp.install(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", APPLY, str(tmp_path / "seccomp" / seccomp.PROFILE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    absent = {"io_uring_setup", "io_uring_enter", "io_uring_register", "clone3"}
    forbidden = {"mount", "unshare", "setns", "bpf", "AF_ALG", "AF_VSOCK"}
    forbidden |= {"clone 0x20000", "clone 0x10000000", "clone 0x20000000", "clone 0x40000000"}
    assert {name for name, code in found.items() if code == errno.ENOSYS} == absent
    assert {name for name, code in found.items() if code == errno.EPERM} == forbidden
    fine = {"getppid", "umask", "AF_INET", "AF_UNIX", "thread", "process", "fork"}
    assert {name for name, code in found.items() if code == 0} == fine


def test_the_file_is_written_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "seccomp" / seccomp.PROFILE
    assert seccomp.check(tmp_path, wanted=True)[0] == "Pass"
    assert json.loads(path.read_text()) == seccomp.profile()
    assert path.stat().st_mode & 0o777 == 0o644
    first = path.stat().st_ino
    seccomp.install(tmp_path)
    assert path.stat().st_ino == first
    path.write_text("{")
    seccomp.install(tmp_path)
    assert json.loads(path.read_text()) == seccomp.profile()
    # A link is not followed: what it points to is nobody's profile.
    victim = tmp_path / "victim"
    victim.write_text("x")
    path.unlink()
    path.symlink_to(victim)
    seccomp.install(tmp_path)
    assert victim.read_text() == "x"
    assert not path.is_symlink()
    assert os.listdir(path.parent) == [path.name]


def test_nothing_is_made_where_the_kubelet_is_not(tmp_path: Path) -> None:
    status, message, remedy = seccomp.check(tmp_path / "none", wanted=True)
    assert (status, bool(remedy)) == ("Warn", True)
    assert "does not start here" in message
    assert not (tmp_path / "none").exists()


def test_who_does_not_want_it_gets_none_and_keeps_what_is_there(tmp_path: Path) -> None:
    status, message, _ = seccomp.check(tmp_path, wanted=False)
    assert status == "Pass"
    assert "not installed" in message
    assert not (tmp_path / "seccomp").exists()
    seccomp.install(tmp_path)
    assert "is there" in seccomp.check(tmp_path, wanted=False)[1]


@pytest.mark.parametrize(("setting", "there"), [("install", True), ("none", False)])
def test_the_doctor_keeps_it_there(tmp_path: Path, setting: str, there: bool) -> None:
    flags = ["--node-name=n", f"--store-dir={tmp_path}", f"--kubelet-dir={tmp_path}", f"--criu-prefix={tmp_path}"]
    health = LocalOps(config.parse([*flags, f"--seccomp-profile={setting}"], {})).doctor()
    assert {check.name: check.status for check in health.checks}["seccomp"] == "Pass"
    assert (tmp_path / "seccomp" / seccomp.PROFILE).exists() is there


def test_a_setting_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse(["--node-name=n"], {"VLLMSNAPSHOT_SECCOMP_PROFILE": "yes"})
    assert "--seccomp-profile yes" in capsys.readouterr().err
