"""Prove on a GPU that processes which use it can be captured, ended and restored: `python -m tests.gpu`. See docs/gpu.md.

JSON on stdout, progress on stderr. Exit status: 0 proved, 1 something is wrong, 2 this machine lacks what a proof needs (without
CRIU the driver's part is tried all the same), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.gpu import place as places
from tests.gpu import workloads
from tests.gpu.place import Place, UnusableError
from tests.gpu.proof import OutOfTime, Proof, ProofError, SkippedError, Timed, Workload, available_memory, interrupt, limited
from tests.node.bare import prefix
from vllmsnapshot.agent import identity
from vllmsnapshot.agent.criu import MINIMUM, Criu, CriuError
from vllmsnapshot.agent.errors import AgentError

SECONDS: Final = {"bandwidth": 30, "driver": 150, "torch": 120, "vllm": 270}
"""Time limits; 9.5 minutes in all."""

MEGABYTES: Final = 2048
"""Of GPU memory that a proof fills, by default, where there is room."""

FAKE_MEGABYTES: Final = 1024
"""Memory of the fake GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and print the result."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="    %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    report: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "fake": options.fake, "result": "failed"}
    try:
        code = _run(options, report, say)
    except UnusableError as e:
        say(str(e))
        report |= {"result": "nothing proved", "why": str(e)}
        code = 2
    except KeyboardInterrupt:
        say("interrupted; everything is removed")
        report["result"] = "interrupted"
        code = 130
    report["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(report, indent=2), flush=True)
    say(f"{report['result']}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--gpu", type=int, metavar="N", help="use /dev/nvidiaN (default: the first)")
    parser.add_argument("--megabytes", type=int, help=f"GPU memory to fill (default: {MEGABYTES}, less where there is no room)")
    parser.add_argument("--only", default=",".join(("driver", "torch", "vllm")), metavar="A,B", help="of driver, torch, vllm")
    parser.add_argument("--model", type=Path, help="a model's directory for vLLM (default: a tiny one with random weights)")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile and CUDA graphs")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="where artifacts go, and are removed from")
    parser.add_argument("--without-criu", action="store_true", help="only the driver's part")
    parser.add_argument("--time-factor", type=float, default=1.0, metavar="F", help="longer (or shorter) time limits")
    parser.add_argument("--fake", action="store_true", help="a stand-in for driver and GPU: tries this script, proves nothing")
    parser.add_argument("--fault", action="append", default=[], metavar="LINE", help="with --fake: what goes wrong (libcuda.c)")
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    interrupt(KeyboardInterrupt)


def _run(options: argparse.Namespace, report: dict[str, Any], say: Callable[[str], None]) -> int:
    wanted = [name for name in SECONDS if name in options.only.split(",")]
    if not wanted or set(options.only.split(",")) - set(wanted):
        raise UnusableError(f"--only takes of driver, torch, vllm, not {options.only}")
    if os.geteuid() != 0:
        raise UnusableError("namespaces, cgroups and CRIU need root")
    criu, why = (None, "not wanted") if options.without_criu else _criu()
    if criu is None:
        report["withoutCriu"] = why
        say(f"without CRIU: {why}")
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="vllmsnapshot-gpu-", dir=options.directory))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        (directory / "model").mkdir()
        where = stack.enter_context(_place(options, directory))
        cuda = Timed(where.agent)
        stack.callback(cuda.close)
        report["machine"] = _machine(criu)
        report["driver"] = _driver(cuda, where)
        device = report["driver"]["device"]
        say(f"{device['name']}, driver {report['driver']['version']}, CRIU {report['machine']['criu']}")
        proof = Proof(place=where, cuda=cuda, criu=criu, directory=directory, say=say)
        report["proofs"] = []
        with contextlib.suppress(ProofError, OutOfTime), limited(SECONDS["bandwidth"] * options.time_factor):
            proof.bandwidth = report["bandwidth"] = _bandwidth(
                proof, min((options.megabytes or 256) << 20, 256 << 20, device["free"] // 4)
            )
            say(", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in proof.bandwidth.items() if way != "bytes"))
        for name in wanted:
            report["proofs"].append(result := {"name": name})
            _prove(proof, name, options, device, result)
    return _judge(report)


def _criu() -> tuple[Criu | None, str]:
    """CRIU, or why there is none."""
    found = prefix() or (Path("/") if Path("/usr/sbin/criu").exists() else None)
    if found is None:
        return None, "set VLLMSNAPSHOT_CRIU_PREFIX to a copy of /opt/criu out of the operator's image"
    criu = Criu(prefix=found)
    try:
        version = criu.version()
        if tuple(int(x) for x in version.split(".")) < MINIMUM:
            return None, f"{found} has version {version}, {'.'.join(map(str, MINIMUM))} is needed"
        criu.check()
    except CriuError as e:
        return None, str(e)
    return criu, ""


@contextlib.contextmanager
def _place(options: argparse.Namespace, directory: Path) -> Iterator[Place]:
    packages = [p for name in ("torch", "vllm") if (p := workloads.installed(name)) is not None]
    seen = [*packages, options.model or directory / "model"]
    if options.fake:
        with places.fake(FAKE_MEGABYTES, options.fault, seen) as made:
            yield made
    else:
        yield places.real(options.gpu, seen)


def _machine(criu: Criu | None) -> dict[str, Any]:
    model, _ = identity.cpu()
    return {
        "kernel": platform.release(),
        "cpu": model,
        "memoryBytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "criu": "none" if criu is None else criu.version(),
    }


def _driver(cuda: Timed, where: Place) -> dict[str, Any]:
    began = time.monotonic()
    try:
        facts = cuda.raw()
    except Exception as e:
        raise UnusableError(f"the driver cannot be used: {e}") from e
    device = next((d for d in facts["devices"] if f"/dev/nvidia{d['minor']}" in where.mounts), None)
    if device is None:
        raise UnusableError(f"the driver does not know the GPU: {facts}")
    return {
        "version": facts["driver"],
        "cudaApi": facts["api"],
        "device": {k: v for k, v in device.items() if k != "used"},
        "devices": len(facts["devices"]),
        "startSeconds": round(time.monotonic() - began, 2),
    }


def _bandwidth(proof: Proof, size: int) -> dict[str, float]:
    """Bytes per second of the GPU's own copies, measured in a process like the others."""
    app = [sys.executable, "-m", "tests.gpu.app_driver", "bandwidth", str(size)]
    with contextlib.ExitStack() as stack:
        engine = proof.container(stack, app)
        engine.start()
        said = engine.message("up")
    return {"toDevice": round(said["toDevice"]), "toHost": round(said["toHost"]), "bytes": size}


def _prove(proof: Proof, name: str, options: argparse.Namespace, device: dict[str, Any], result: dict[str, Any]) -> None:
    """One proof; whatever happens, `result` says it."""
    proof.say(f"--- {name}")
    began = time.monotonic()
    limit = SECONDS[name] * options.time_factor
    try:
        with limited(limit):
            proof.run(_workload(proof, name, options, device), result)
        result["result"] = "passed"
    except SkippedError as e:
        result |= {"result": "skipped", "why": str(e)}
    except OutOfTime:
        result |= {"result": "failed", "why": f"not done within {limit:g} s"}
    except KeyboardInterrupt:
        result |= {"result": "interrupted"}
        raise
    except (ProofError, AgentError, OSError, AssertionError) as e:
        result |= {"result": "failed", "why": f"{type(e).__name__}: {e}"}
    finally:
        result["allSeconds"] = round(time.monotonic() - began, 2)
        shutil.rmtree(proof.directory / name, ignore_errors=True)
    proof.say(f"{name}: {result['result']}{': ' + result['why'] if 'why' in result else ''}")


def _workload(proof: Proof, name: str, options: argparse.Namespace, device: dict[str, Any]) -> Workload:
    if name == "vllm":
        return workloads.Vllm(proof.directory, options.model, int(device["total"]), eager=options.eager)
    size = _size(options, proof.directory, int(device["free"])) if name == "driver" else 256 << 20
    return workloads.Driver(size) if name == "driver" else workloads.Torch(size)


def _size(options: argparse.Namespace, directory: Path, free: int) -> int:
    """Bytes of GPU memory to fill: as asked, or so many that there is room everywhere for two copies at once."""
    if options.megabytes:
        return int(options.megabytes) << 20
    disk = os.statvfs(directory)
    return max(1 << 20, min(MEGABYTES << 20, free // 4, available_memory() // 8, disk.f_bavail * disk.f_frsize // 4))


def _judge(report: dict[str, Any]) -> int:
    results = [p.get("result") for p in report["proofs"]]
    report["skipped"] = [f"{p['name']}: {p['why']}" for p in report["proofs"] if p["result"] == "skipped"]
    report["skipped"] += [f"{p['name']}: {text}" for p in report["proofs"] for text in p.get("skipped", [])]
    if "bandwidth" not in report:
        report["skipped"].append("bandwidth: it could not be measured")
    if "failed" in results:
        return 1
    if "passed" not in results or "withoutCriu" in report:
        report["result"] = "nothing proved" if "passed" not in results else "without CRIU"
        return 2
    report["result"] = "passed"
    return 0


if __name__ == "__main__":
    sys.exit(main())
