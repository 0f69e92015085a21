"""As much of vLLM's own `vllm.snapshot.server` as init has to know: the barrier, no serving.json, no --unattended.

With IGNORE_SIGTERM set it ignores SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--release-file", type=Path, required=True)
    parser.add_argument("--release-timeout-s", type=float)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    if os.environ.get("IGNORE_SIGTERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready = {"token_ids": [7], "text": " Paris", "sampled_token_logprob": -0.25}
    options.ready_file.with_suffix(".tmp").write_text(json.dumps(ready))
    options.ready_file.with_suffix(".tmp").rename(options.ready_file)
    while not options.release_file.exists():
        time.sleep(0.01)
    release = json.loads(options.release_file.read_text())
    HTTPServer((release["host"] or "", release["port"]), BaseHTTPRequestHandler).serve_forever()
