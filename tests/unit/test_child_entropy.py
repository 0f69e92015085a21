"""What clones must not draw alike. That a restored copy is where it was, and then is not, is shown with CRIU in tests/node/test_criu_bare.py."""

from __future__ import annotations

import importlib.metadata
import os
import random
import ssl
import subprocess
import sys
import types
import uuid
from pathlib import Path

import pytest

from tests.unit.child_harness import ROOT
from vllmsnapshot_child import entropy, vllm_process


@pytest.fixture(autouse=True)
def own_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process keeps its own way of making them."""
    for name in ("_generate_time_safe", "_node", "_last_timestamp"):
        monkeypatch.setattr(uuid, name, getattr(uuid, name))


def generators(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Stand-ins for numpy and torch; with what they are seeded."""
    seeds: list[tuple[str, object]] = []

    def seed(name: str) -> object:
        return lambda value: seeds.append((name, value))

    numpy = types.SimpleNamespace(random=types.SimpleNamespace(seed=seed("numpy")))
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(manual_seed=seed("torch")))
    return seeds


def test_every_global_generator_is_seeded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = generators(monkeypatch)
    draws = set()
    for _ in range(3):
        random.seed(1)
        entropy.renew()
        draws.add(random.random())
    assert len(draws) == 3
    assert [name for name, _ in seeds] == ["numpy", "torch"] * 3
    assert len({str(value) for _, value in seeds}) == 6


def test_what_the_user_seeded_is_his(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh start with `--seed` would draw the same: all three, for vLLM draws with each of them. Keys are another matter."""
    seeds = generators(monkeypatch)
    added: list[bytes] = []
    monkeypatch.setattr(ssl, "RAND_add", lambda data, entropy: added.append(data))
    random.seed(1)
    expected = random.random()
    random.seed(1)
    entropy.renew(keep_seeded=True)
    assert random.random() == expected
    assert seeds == []
    assert [len(data) for data in added] == [32]


def test_nothing_is_imported_for_it() -> None:
    """torch would take seconds, in a process that has no use for it."""
    script = "import sys; from vllmsnapshot_child import entropy; entropy.renew(); print(*sys.modules)"
    env = {"PYTHONPATH": str(ROOT / "child")}
    modules = subprocess.run([sys.executable, "-S", "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert not {"numpy", "torch", "tempfile", "uuid", "multiprocessing"} & set(modules.split())


def test_a_time_based_id_names_no_network_card_of_another_pod() -> None:
    nodes = set()
    for _ in range(3):
        entropy.renew()
        made = uuid.uuid1()
        nodes.add(made.node)
        assert made.node & entropy.MULTICAST
    assert len(nodes) == 3


# --- vLLM's own ---


class BlockHashes(types.ModuleType):
    """vllm.v1.core.kv_cache_utils, as far as it is asked."""

    DEFAULT_NONE_HASH_SEED = "vllm-none-hash"

    def __init__(self, seed: str | None) -> None:
        super().__init__("kv_cache_utils")
        self._NON_CRYPTO_HASH_FUNCTIONS = frozenset({self.xxhash, self.missing})
        self._NONE_HASH_SEED = seed
        self.NONE_HASH = b"" if seed is None else self.xxhash(seed)

    def xxhash(self, seed: str) -> bytes:
        return b"xx" + seed.encode()

    def missing(self, seed: str) -> bytes:
        raise ImportError("no such package")

    def init_none_hash(self, function: object) -> None:
        assert function == self.xxhash
        self._NONE_HASH_SEED = os.urandom(32).hex()
        self.NONE_HASH = self.xxhash(self._NONE_HASH_SEED)


@pytest.mark.parametrize(("seed", "changes"), [("secret", True), ("vllm-none-hash", False), ("7", False), (None, False)])
def test_the_secret_of_the_block_hashes(seed: str | None, changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where vLLM drew one: not for SHA-256, whose seed is the same everywhere, nor where PYTHONHASHSEED is the user's."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    module = BlockHashes(seed)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", module)
    before = module.NONE_HASH
    entropy.renew()
    assert (before != module.NONE_HASH) == changes


def test_vllm_finds_the_plugin() -> None:
    distributions = importlib.metadata.distributions(path=[str(ROOT / "child")])
    (entry,) = [e for d in distributions for e in d.entry_points if e.group == "vllm.general_plugins"]
    assert (entry.name, entry.load()) == (vllm_process.PLUGIN, vllm_process.register)
    assert "COPY child/vllmsnapshot_child.dist-info" in (ROOT / "Dockerfile.child").read_text()


def test_the_plugin_gives_the_engines_process_its_methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core", raising=False)
    vllm_process.register()  # in a process that has no engine
    core = types.ModuleType("core")
    core.EngineCore = type("EngineCore", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", core)
    vllm_process.register()
    engine = core.EngineCore()
    monkeypatch.delenv("POD_NAME", raising=False)
    random.seed(1)
    expected = random.random()
    random.seed(1)
    engine.vllmsnapshot_renew({"POD_NAME": "b"}, True)
    assert os.environ["POD_NAME"] == "b"
    assert random.random() != expected, "the user's seed is for the process that has the model"
    assert engine.vllmsnapshot_trim() > 0
