"""The proof for a GPU, `python -m tests.gpu`, against the fake driver: real processes, real CRIU, the agent's own code.

On hardware there are minutes for it; here it is kept from rotting, and made to find what it is there to find.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import build_libcuda, make_gpus
from tests.gpu import place as places
from tests.gpu import workloads
from tests.gpu.proof import OutOfTime, held, limited
from tests.node.bare import prefix
from vllmsnapshot.agent import driver

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(prefix() is None, reason="no CRIU: set VLLMSNAPSHOT_CRIU_PREFIX"),
]

STEPS = {"lock", "checkpoint", "criu", "freeze", "restore", "unlock"}


class Script:
    """A run of the script."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        megabytes: int = 32,
        within: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`within`: a command that runs the script. `env`: the machine has the driver that this names, instead of --fake."""
        self.directory = directory
        self._mark = f"VLLMSNAPSHOT_TEST_MARK={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        size = ["--megabytes", str(megabytes)]
        self.process = subprocess.Popen(
            [
                *within,
                *(sys.executable, "-m", "tests.gpu", *size, "--directory", str(directory), *arguments),
                *(["--fake"] if env is None else []),
            ],
            cwd=ROOT,
            # As on a machine where nothing is installed.
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {name: value} | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, words: str) -> None:
        """Wait for a line of progress."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if words in line:
                return
        raise AssertionError(f"{words!r} did not come")

    def end(self) -> tuple[int, dict[str, Any]]:
        """Its exit status and report; nothing of it may be left."""
        out, err = self.process.communicate()
        assert self.left() == [], "processes"
        assert list(self.directory.iterdir()) == [], "files"
        try:
            return self.process.returncode, json.loads(out)
        except ValueError:
            raise AssertionError(f"no report but {out!r}; {err}") from None

    def left(self) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "comm").read_text())
            except OSError:
                continue
        return found


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """For artifacts. What the script keeps elsewhere is compared before and after."""
    before = set(Path("/dev/shm").glob("vllmsnapshot-gpu-*"))
    made = tmp_path / "artifacts"
    made.mkdir()
    yield made
    assert set(Path("/dev/shm").glob("vllmsnapshot-gpu-*")) <= before


def test_a_proof_and_its_report(directory: Path) -> None:
    code, report = Script(directory).end()
    assert code == 0, report
    assert (report["result"], report["fake"]) == ("passed", True)
    driver = report["proofs"][0]
    assert driver["checks"] == [
        "the captured process goes on, memory and results are right",
        "restore 1: memory and results are equal",
        "restore 2: memory and results are equal",
    ]
    assert driver["process"]["bytes"] >= 32 << 20
    assert driver["memoryUsedBytes"] >= driver["process"]["bytes"]
    assert driver["artifactBytes"] > driver["memoryUsedBytes"], "the memory of the GPU is in the artifact"
    assert set(driver["capture"]["seconds"]) >= STEPS
    assert all(set(r["seconds"]) >= {"criu", "restore", "unlock", "all"} for r in driver["restores"])
    assert all(r["restoreBytesPerSecond"] > 0 and r["restoreOfBandwidth"] > 0 for r in driver["restores"])
    assert driver["memoryNotGivenBackBytes"] == 0
    assert report["bandwidth"]["toHost"] > 0
    assert report["driver"]["device"]["name"] == "Fake H200"
    for name in ("torch", "vllm"):
        if workloads.installed(name) is None:
            assert any(line.startswith(f"{name}: ") and "not installed" in line for line in report["skipped"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        # The first restore puts the captured process back to work, the others are the two copies.
        ("Checkpoint 1 lose", "did not go on as before: memory is"),
        ("Restore 1 lose", "did not go on as before: memory is"),
        ("Restore 2 lose", "is not what was captured: before"),
        ("Restore 3 lose", "is not what was captured: before"),
        ("Lock 1 error 600", "GpuCheckpointFailed: Lock of process"),
        ("Restore 2 error 2", "GpuOutOfMemory: Restore of process"),
        ("Unlock 3 stay", "is LOCKED instead of RUNNING"),
    ],
)
def test_what_is_wrong_is_found(directory: Path, fault: str, words: str) -> None:
    code, report = Script(directory, "--only", "driver", "--fault", fault).end()
    assert code == 1, report
    assert report["result"] == "failed"
    assert words in report["proofs"][0]["why"]


def test_the_drivers_part_can_be_tried_where_criu_does_not_work(directory: Path) -> None:
    code, report = Script(directory, "--only", "driver", "--without-criu").end()
    assert code == 2
    assert report["result"] == "without CRIU"
    assert report["proofs"][0]["result"] == "passed"
    assert set(report["proofs"][0]["capture"]["seconds"]) == {"lock", "checkpoint", "restore", "unlock"}
    code, report = Script(directory, "--only", "driver", "--without-criu", "--fault", "Checkpoint 1 lose").end()
    assert code == 1


def test_devices_and_libraries_of_a_machine_are_found(directory: Path) -> None:
    """The script without --fake, in a mount namespace where the fake driver is the machine's."""
    with tempfile.TemporaryDirectory(prefix="vllmsnapshot-gpu-test-", dir="/var/tmp") as name:
        base = Path(name)
        for part in ("gpus", "lib", "dev"):
            (base / part).mkdir()
        make_gpus(base / "gpus", 2, 512)
        library = build_libcuda(base / "lib")
        nvml = library.with_name("libnvidia-ml.so.1")
        shutil.copy(library, nvml)
        mounts = """set -e
            mount --make-rprivate /
            mount -t tmpfs tmpfs "$1/dev"
            for file in null zero full random urandom; do touch "$1/dev/$file"; mount --bind /dev/$file "$1/dev/$file"; done
            mkdir "$1/dev/shm" "$1/dev/pts"; mount --bind /dev/shm "$1/dev/shm"
            mount -t devpts devpts "$1/dev/pts" -o newinstance,ptmxmode=0666; ln -s pts/ptmx "$1/dev/ptmx"
            for file in nvidiactl nvidia-uvm; do touch "$1/dev/$file"; mount --bind "$1/gpus/$file" "$1/dev/$file"; done
            for n in 0 1; do touch "$1/dev/nvidia$n"; mount --bind "$1/gpus/gpu$n" "$1/dev/nvidia$n"; done
            # A library on a file system of its own, as container toolkits have it.
            mount --bind "$1/lib" "$1/lib"
            umount --recursive --lazy /dev
            mount --rbind "$1/dev" /dev
            shift; exec "$@" """
        env = {driver.LIBCUDA: str(library), driver.LIBNVML: str(nvml), places.FAKE_GPU: str(base / "gpus")}
        script = Script(
            directory, "--only", "driver", "--gpu", "1", within=["unshare", "-m", "sh", "-c", mounts, "sh", name], env=env
        )
        code, report = script.end()
    assert code == 0, report
    assert (report["fake"], report["driver"]["device"]["minor"], report["driver"]["devices"]) == (False, 1, 2)
    assert len(report["proofs"][0]["checks"]) == 3


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_proved(directory: Path) -> None:
    code, report = Script(directory, env={}).end()
    assert (code, report["result"]) == (2, "nothing proved")
    assert "there is no /dev/nvidia0" in report["why"]


def test_one_restore_where_there_is_room_for_one(directory: Path) -> None:
    # Of 1024 MB; a copy needs 128 MB beside its own.
    code, report = Script(directory, "--only", "driver", megabytes=400).end()
    assert code == 0, report
    assert len(report["proofs"][0]["restores"]) == 1
    assert "the GPU has" in report["skipped"][0]


def test_a_proof_that_takes_too_long_fails_and_leaves_nothing(directory: Path) -> None:
    script = Script(directory, "--only", "driver", "--fault", "Checkpoint 1 slow 600000", "--time-factor", "0.1")
    code, report = script.end()
    assert code == 1
    assert report["proofs"][0]["why"] == "not done within 15 s"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["capturing it", "restoring it"])
def test_an_interruption_leaves_nothing(directory: Path, moment: str, number: signal.Signals) -> None:
    script = Script(directory, "--only", "driver")
    script.until(moment)
    script.process.send_signal(number)
    code, report = script.end()
    assert code == 130
    assert report["result"] == "interrupted"
    assert report["proofs"][0]["result"] == "interrupted"


def test_what_must_not_stay_half_made_is_interrupted_afterwards() -> None:
    done = []

    def interrupted() -> None:
        with limited(60), held():
            signal.raise_signal(signal.SIGALRM)
            with held():
                done.append("inner")
            done.append("outer")

    with pytest.raises(OutOfTime):
        interrupted()
    assert done == ["inner", "outer"]
    with held():
        pass


def test_a_time_limit_ends_what_waits() -> None:
    with pytest.raises(OutOfTime), limited(0.01):
        signal.pause()
    with limited(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
