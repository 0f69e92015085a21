"""The child's list of arguments against vLLM's own parser, in the workload's image: names, defaults and abbreviations change there."""

from __future__ import annotations

import json

import pytest

from tests.system import System
from vllmsnapshot.kube import PODS, Object
from vllmsnapshot_child.vllm_engine import REFUSED

UNACCEPTABLE = {
    "enable-ssl-refresh": [],
    "enable-lora": [],
    "enable-expert-parallel": [],
    "enable-eplb": [],
    "enable-elastic-ep": [],
    "grpc": [],
    "headless": [],
    "host": ["0.0.0.0"],
    "uds": ["/run/x"],
    "api-key": ["hunter2"],
    "ssl-keyfile": ["/x"],
    "ssl-certfile": ["/x"],
    "ssl-ca-certs": ["/x"],
    "ssl-ciphers": ["x"],
    "middleware": ["a.b"],
    "lora-modules": ["a=/b"],
    "speculative-config": ['{"method": "ngram", "num_speculative_tokens": 2}'],
    "spec-method": ["ngram"],
    "spec-model": ["x"],
    "logprobs-mode": ["raw_logits"],
    "distributed-executor-backend": ["mp"],
    "kv-transfer-config": ['{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
    "kv-events-config": ['{"enable_kv_cache_events": true}'],
    "ec-transfer-config": ['{"ec_connector": "x", "ec_role": "ec_producer"}'],
    "weight-transfer-config": ['{"backend": "nccl"}'],
    "otlp-traces-endpoint": ["http://collector:4317"],
    "mm-tensor-ipc": ["torch_shm"],
}
"""What is put behind a flag; any other one gets a 2."""

SCRIPT = """
import json, sys
from vllmsnapshot_child import vllm_engine
from vllmsnapshot_child.engine import EngineError

def verdict(argv):
    try:
        engine = vllm_engine.create(["--model", "m", *argv], barrier=True)
    except EngineError as e:
        return f"{e.reason}: {e.message}"
    except Exception as e:
        return f"not refused: {type(e).__name__}: {e}"
    return f"accepted, seed {engine.args.seed} {'of the user' if engine.seeded else 'by default'}"

print("VERDICTS " + json.dumps([verdict(argv) for argv in json.load(sys.stdin)]))
"""

DEFAULT_SEED = "accepted, seed 0 by default"
ACCEPTED: dict[str, tuple[list[str], str]] = {
    "nothing": ([], DEFAULT_SEED),
    "others": (["--enforce-eager", "--max-model-len=512", "-tp", "1"], DEFAULT_SEED),
    "a seed": (["--seed", "7"], "accepted, seed 7 of the user"),
    "the default as the user's": (["--seed=0"], "accepted, seed 0 of the user"),
    "abbreviated": (["--see", "7"], "accepted, seed 7 of the user"),
}
ABBREVIATED = [
    ["--tensor-paral", "2"],
    ["--tensor_parallel_size=2"],
    ["-tp", "2"],
    ["--kv-transfer", '{"kv_connector": "x", "kv_role": "kv_both"}'],
]


@pytest.fixture
async def verdicts(system: System) -> dict[str, str]:
    """What the child says to each list of arguments, by their JSON: one start of vLLM's parser for all of them."""
    asked = [
        *(argv for argv, _ in ACCEPTED.values()),
        *ABBREVIATED,
        *([f"--{flag}", *UNACCEPTABLE.get(flag, ["2"])] for flag in REFUSED),
    ]
    name = "arguments"
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "child",
                    "image": "vllmsnapshot.local/child-cpu:dev",
                    "imagePullPolicy": "Never",
                    "command": ["sh", "-c", 'printf %s "$ASKED" | python3 -c "$SCRIPT"'],
                    "env": [{"name": "SCRIPT", "value": SCRIPT}, {"name": "ASKED", "value": json.dumps(asked)}],
                }
            ],
        },
    }
    system.apply(pod)

    async def ended() -> str | None:
        found = await system.kube.get(PODS, name, "default")
        phase = (found or {}).get("status", {}).get("phase")
        return str(phase) if phase in ("Succeeded", "Failed") else None

    try:
        phase = await system.until("vLLM's parser", ended, 180)
        said = system.backend.kubectl("logs", name)
    finally:
        system.backend.kubectl("delete", "pod", name, "--wait=false")
    assert phase == "Succeeded", said
    (line,) = [line for line in said.splitlines() if line.startswith("VERDICTS ")]
    answers = json.loads(line.removeprefix("VERDICTS "))
    return dict(zip((json.dumps(argv) for argv in asked), answers, strict=True))


async def test_arguments_are_judged_as_vllm_parses_them(verdicts: dict[str, str]) -> None:
    for argv, said in ACCEPTED.values():
        assert verdicts[json.dumps(argv)] == said
    for argv in ABBREVIATED:
        assert verdicts[json.dumps(argv)].startswith("BadArguments: --"), argv
    for flag in REFUSED:
        said = verdicts[json.dumps([f"--{flag}", *UNACCEPTABLE.get(flag, ["2"])])]
        assert said.startswith(f"BadArguments: --{flag} is not supported"), f"--{flag}: {said}"
        assert "hunter2" not in said
