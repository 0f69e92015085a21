"""A small real model for the end-to-end tests, from a Python package, in the form that vLLM loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.cluster import cache, images
from tests.cluster.progress import Progress

_RECIPE: Final = images.Recipe(
    "vllmsnapshot.local/model:1",
    "tests/images/model.Dockerfile",
    ("tests/images/model.lock", "tests/images/convert_smollm2.py"),
    base="vllm-cpu",
)


def smollm2(progress: Progress) -> Path:
    """The directory of SmolLM2-135M-Instruct as bf16 safetensors, converted once."""
    inputs = [images.ROOT / source for source in (_RECIPE.dockerfile, *_RECIPE.sources)]
    key = cache.digest(*inputs)
    models = cache.cache_root() / "models"

    def make(directory: Path) -> None:
        (base,) = images.build_all(["vllm-cpu"], progress)
        with progress.step("converting SmolLM2"):
            images.files_of(_RECIPE, base, progress)(directory)

    model = cache.publish(
        "smollm2", key, make, root=models, on_wait=lambda: progress.note("another process converts the model; waiting")
    )
    # A name without the key, for people and manifests. A pod gets the real path: a hostPath must not be a link.
    link = models / "smollm2"
    if not link.is_symlink() or link.readlink() != Path(model.name):
        temporary = models / f".smollm2.{os.getpid()}"
        temporary.symlink_to(model.name)
        temporary.replace(link)
    return model
