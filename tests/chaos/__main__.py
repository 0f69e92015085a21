"""`make chaos`: a run on a cluster of its own. Prints the seed first, the actions as they happen, and a verdict; writes build/chaos.json."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path

from tests.chaos.run import Run, own_disk
from tests.chaos.schedule import schedule
from tests.cluster.progress import Progress
from tests.system import ROOT, diagnose, local_cluster


def main() -> int:
    """Exit status 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults happen; it takes some minutes more")
    parser.add_argument("--seed", type=int, default=None, help="repeat the actions of an earlier run")
    parser.add_argument("--name", default="chaos", help="name of the cluster")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--list", action="store_true", help="print the actions, and do nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "build/chaos.json")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed} (repeat with: make chaos SEED={seed} MINUTES={options.minutes:g})", flush=True)
    actions = schedule(seed, options.minutes * 60)
    if options.list:
        print("\n".join(map(str, actions)))
        return 0
    run = Run(seed, actions, lambda line: print(line, flush=True))
    cluster = local_cluster(options.name, ["engine"], Progress(), prepared=own_disk)
    try:
        with cluster.enter_network():
            try:
                asyncio.run(run.play(cluster, options.output.with_suffix(".log")))
            except BaseException as e:
                run.faults.append(f"the run was cut off: {type(e).__name__}: {e}")
                raise
            finally:
                if run.faults:
                    diagnose(cluster)
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(run.summary(), indent=2) + "\n")
    finally:
        if not options.keep:
            cluster.down()
    summary = run.summary()
    print(json.dumps({key: value for key, value in summary.items() if key != "log"}, indent=2))
    print(
        f"seed {seed}: {'passed' if summary['passed'] else 'FAILED'}; summary: {options.output}, logs: {options.output.with_suffix('.log')}"
    )
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
