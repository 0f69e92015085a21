"""Writes what is generated out of the code besides CRDs and manifests; with --check says what would change (exit status 1)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tools import api_reference, chart_readme, cli_reference, dashboard, reference

ROOT = Path(__file__).resolve().parents[1]

GENERATED: dict[str, Callable[[], str]] = {
    "deploy/helm/vllmsnapshot/README.md": chart_readme.text,
    "deploy/helm/vllmsnapshot/files/monitoring/dashboard.json": dashboard.text,
    "docs/reference/api.md": api_reference.text,
    "docs/reference/cli.md": cli_reference.text,
    "docs/reference/metrics.md": reference.metrics,
    "docs/reference/conditions.md": reference.conditions,
    "docs/reference/events.md": reference.events,
    "docs/reference/logs.md": reference.log_keys,
}
"""Path to what the file has to hold."""


def main(arguments: list[str]) -> int:
    """Write, or with --check compare."""
    check = "--check" in arguments
    stale = [path for path, text in GENERATED.items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text()]
    for path in stale:
        if not check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(GENERATED[path]())
        sys.stdout.write(f"{'out of date' if check else 'written'}: {path}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
