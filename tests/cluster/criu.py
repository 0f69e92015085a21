"""CRIU as the operator's image has it, for tests that need neither image nor cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.cluster import cache, debian, images
from tests.cluster.progress import Progress

_RECIPE: Final = images.Recipe("vllmsnapshot.local/criu:1", "Dockerfile.operator", (), target="criu-prefix")


def build(progress: Progress) -> Path:
    """Its prefix, built once; tests/node/bare.py finds it there."""
    base = debian.base_image(progress)
    key = cache.digest(images.ROOT / _RECIPE.dockerfile, base.digest)

    def make(directory: Path) -> None:
        with progress.step("CRIU without its image"):
            images.files_of(_RECIPE, base, progress)(directory)

    return cache.publish("criu", key, make, on_wait=lambda: progress.note("another process builds CRIU; waiting"))
