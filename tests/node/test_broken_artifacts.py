"""An artifact that is not what it was, or does not fit any more, never serves: the replica starts cold and says why."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, images, oci
from tests.node.engine.small import WORDS, pattern
from tests.node.snapshot import IMAGE, MIB, Make, Snapshot, answer, report, restarts
from tests.nodeview import NodeView, flip
from tests.system import System
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import Object

R = c.Reason


async def came_up_cold(snap: Snapshot, seed: Object, reasons: set[str], text: str | None = None) -> Object:
    """Scale to two, wait for the second; it must have started cold for one of these reasons, and nobody may ever lie."""
    snap.scale(2)
    pods = await snap.ready(2, timeout_s=90)
    (pod,) = [p for p in pods if p["metadata"]["uid"] != seed["metadata"]["uid"]]
    said = report(pod)
    assert said.start == c.START_COLD
    # Quarantined already when the replica asked again: then that is the reason, and the message says what for.
    assert any(reason in f"{said.reason}: {said.message}" for reason in reasons), said
    assert await snap.ask(pod) == (text or answer())
    assert restarts(seed) == restarts(pod) == 0, "falling back needs no new container"
    snap.never_wrong(*{text or answer(), answer()})
    return pod


async def quarantined(snap: Snapshot, content: str) -> str:
    """Wait until the content has been quarantined; why."""

    async def probe() -> str | None:
        found = snap.seen.content_conditions(content).get(c.QUARANTINED)
        return str(found["reason"]) if found else None

    return await snap.system.until(f"{content} to be quarantined", probe, 30)


async def recaptured(snap: Snapshot, content: str) -> None:
    """Wait for another artifact, and see a replica come up from it."""

    async def probe() -> str | None:
        captured = [name for name in snap.seen.contents if c.CAPTURED in snap.seen.content_conditions(name)]
        return next((name for name in captured if name != content), None)

    other = await snap.system.until("another artifact", probe, 60)
    before = await snap.pods()
    snap.scale(len(before) + 1)
    newcomer = await snap.newcomer(before)
    await snap.ready(len(before) + 1)
    pod = await snap.pod(newcomer["metadata"]["name"])
    assert (report(pod).start, report(pod).content) == (c.START_RESTORE, other)
    assert await snap.ask(pod) == answer()


def flip_memory(files: list[Path]) -> None:
    flip(files, pattern(2, 2 * MIB)[MIB : MIB + 64])


def flip_memory_unseen(files: list[Path]) -> None:
    flip(files, pattern(2, 2 * MIB)[MIB : MIB + 64], keep_time=True)


def flip_second_process(files: list[Path]) -> None:
    flip(files, pattern(3, 2 * MIB)[MIB : MIB + 64], keep_time=True)


def truncate(files: list[Path]) -> None:
    with files[-1].open("r+b") as f:
        f.truncate(files[-1].stat().st_size - 8192)


def remove_pages(files: list[Path]) -> None:
    files[0].unlink()


def remove_manifest(files: list[Path]) -> None:
    directory = files[0].parent
    while not list(directory.glob("manifest*")):
        directory = directory.parent
    for path in directory.glob("manifest*"):
        path.unlink()


CORRUPT = {R.ARTIFACT_CORRUPT, R.CANARY_MISMATCH, R.RESTORE_DIED}


@pytest.mark.parametrize(
    ("damage", "reasons"),
    [
        (flip_memory, CORRUPT),
        (flip_memory_unseen, CORRUPT),
        (flip_second_process, CORRUPT),
        (truncate, {R.ARTIFACT_CORRUPT}),
        (remove_pages, {R.ARTIFACT_CORRUPT, R.ARTIFACT_MISSING}),
        (remove_manifest, {R.ARTIFACT_CORRUPT, R.ARTIFACT_MISSING}),
    ],
    ids=lambda value: value.__name__.replace("_", "-") if callable(value) else "",
)
async def test_damaged_files(damage: Callable[[list[Path]], None], reasons: set[str], make: Make, node: NodeView) -> None:
    snap = await make(f"damage-{damage.__name__.replace('_', '-')}")
    seed, content = await snap.seeded()
    damage(node.pages(content))
    await came_up_cold(snap, seed, reasons)
    await quarantined(snap, content)
    if damage in (flip_memory, remove_manifest):
        await recaptured(snap, content)


async def test_damage_after_a_good_restore(make: Make, node: NodeView) -> None:
    """Digests are not computed at each restore: what changes after the first one is for the canary to find."""
    snap = await make("damage-late")
    seed, content = await snap.seeded()
    snap.scale(2)
    good = (await snap.ready(2))[1]
    assert report(good).start == c.START_RESTORE
    flip_memory_unseen(node.pages(content))
    snap.scale(3)
    pods = await snap.ready(3, timeout_s=90)
    (pod,) = [p for p in pods if p["metadata"]["uid"] not in {x["metadata"]["uid"] for x in (seed, good)}]
    assert report(pod).start == c.START_COLD
    assert any(reason in f"{report(pod).reason}: {report(pod).message}" for reason in CORRUPT), report(pod)
    assert restarts(pod) == 0
    snap.never_wrong(answer())
    await quarantined(snap, content)


@pytest.fixture
def changed_image(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Put another image under the tag of the engine's; gives its vocabulary. The right one is put back at the end."""
    original = images.built("engine")
    assert original is not None
    words = tuple(reversed(WORDS))

    def change() -> tuple[str, ...]:
        source = (images.ROOT / "tests/node/engine/small.py").read_text()
        at = source.index("WORDS = ")
        new = f"{source[:at]}WORDS = {words!r}{source[source.index(chr(10), at) :]}"
        cluster.load_image(_with_file(original, tmp_path, "opt/vllmsnapshot/small.py", new.encode()))
        return words

    yield change
    cluster.load_image(original)


def _with_file(image: oci.Image, directory: Path, name: str, content: bytes) -> oci.Image:
    """The image with one file replaced (and its byte code removed), in a layout of its own, under the same name."""
    layout = directory / "layout"
    oci.init_layout(layout)
    for digest in image.manifest_blobs():
        shutil.copyfile(oci.blob_path(image.layout, digest), oci.blob_path(layout, digest))
    new, empty, layer = directory / "new", directory / "empty", directory / "layer.tar"
    new.write_bytes(content)
    empty.touch()
    folder, _, file = name.rpartition("/")
    oci.write_layer(layer, {name: new, f"{folder}/__pycache__/.wh.{file.removesuffix('.py')}.cpython-311.pyc": empty})
    document = json.loads(oci.blob_path(layout, image.digest).read_bytes())
    if "manifests" in document:
        (inner,) = [m for m in document["manifests"] if m.get("platform", {}).get("architecture") != "unknown"]
        document = json.loads(oci.blob_path(layout, inner["digest"]).read_bytes())
    config = json.loads(oci.blob_path(layout, document["config"]["digest"]).read_bytes())

    def put(data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        oci.blob_path(layout, digest).write_bytes(data)
        return {"digest": digest, "size": len(data)}

    added = put(layer.read_bytes())
    config["rootfs"]["diff_ids"].append(added["digest"])
    config.pop("history", None)
    document["config"] |= put(json.dumps(config).encode())
    document["layers"].append({"mediaType": "application/vnd.oci.image.layer.v1.tar", **added})
    return oci.Image(image.reference, layout, str(put(json.dumps(document).encode())["digest"]))


async def test_another_image_under_the_same_tag(make: Make, system: System, changed_image: Callable[[], tuple[str, ...]]) -> None:
    snap = await make("image")
    seed, content = await snap.seeded()
    words = changed_image()
    text = answer(words=words)
    assert text != answer()
    pod = await came_up_cold(snap, seed, {R.IDENTITY_MISMATCH}, text)
    assert "image" in report(pod).message.lower(), "the message names what differs"
    assert snap.seen.answers[pod["metadata"]["uid"]] == {text}
    assert snap.seen.answers[seed["metadata"]["uid"]] == {answer()}
    assert IMAGE in pod["spec"]["containers"][0]["image"]
    assert content


async def test_another_model_in_the_place_of_the_model(make: Make, node: NodeView) -> None:
    directory = node.cluster.node_root / "models/other"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "seed").write_text("1")
    snap = await make(
        "model",
        model="/models/other",
        podTemplate={
            "spec": {
                "containers": [
                    {"name": "engine", "volumeMounts": [{"name": "model", "mountPath": "/models/other", "readOnly": True}]}
                ],
                "volumes": [{"name": "model", "hostPath": {"path": str(directory), "type": "Directory"}}],
            }
        },
    )
    seed, content = await snap.seeded()
    (directory / "seed").write_text("7")
    text = answer(seed=7)
    assert text != answer()
    pod = await came_up_cold(snap, seed, {R.CANARY_MISMATCH, R.IDENTITY_MISMATCH}, text)
    assert snap.seen.answers[pod["metadata"]["uid"]] == {text}
    if R.CANARY_MISMATCH in f"{report(pod).reason}: {report(pod).message}":
        assert await quarantined(snap, content) == R.CANARY_MISMATCH
