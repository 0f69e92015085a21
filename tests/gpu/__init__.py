"""Proof on a GPU: `python -m tests.gpu`. See docs/gpu.md."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vllmsnapshot") is None:
    # A checkout is enough: on a machine with a GPU nothing need be installed for this.
    _root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_root / "operator"), str(_root / "child")]
