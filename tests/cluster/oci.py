"""OCI images without a container engine: write one-layer images, read layouts and archives."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_CHUNK: Final = 1 << 20


def blob_path(layout: Path, digest: str) -> Path:
    """Where a layout keeps the blob *digest* (``sha256:…``)."""
    algorithm, _, value = digest.partition(":")
    return layout / "blobs" / algorithm / value


def _json_blob(layout: Path, value: object) -> tuple[str, int]:
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    path = blob_path(layout, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return digest, len(data)


def init_layout(layout: Path) -> None:
    """Make *layout* an OCI image layout, keeping what is in it."""
    (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    index = layout / "index.json"
    if not index.exists():
        index.write_text(json.dumps({"schemaVersion": 2, "mediaType": _INDEX, "manifests": []}))


def write_image(layout: Path, layer_tar: Path, config: Mapping[str, Any]) -> str:
    """Add an image of the one uncompressed layer *layer_tar* to *layout* and return its manifest digest.

    The file *layer_tar* is moved into the layout.
    """
    init_layout(layout)
    with layer_tar.open("rb") as handle:
        layer = "sha256:" + hashlib.file_digest(handle, "sha256").hexdigest()
    size = layer_tar.stat().st_size
    layer_tar.replace(blob_path(layout, layer))
    config_digest, config_size = _json_blob(
        layout,
        {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": [layer]},
        },
    )
    manifest_digest, manifest_size = _json_blob(
        layout,
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "digest": config_digest, "size": config_size},
            "layers": [{"mediaType": _LAYER, "digest": layer, "size": size}],
        },
    )
    manifests = [{"mediaType": _MANIFEST, "digest": manifest_digest, "size": manifest_size}]
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests}))
    return manifest_digest


@dataclass(frozen=True)
class Image:
    """A named image in an OCI layout directory."""

    reference: str
    layout: Path
    digest: str

    def manifest_blobs(self) -> list[str]:
        """The digests of everything the image consists of, its manifest first."""
        return list(_walk(self.layout, self.digest))

    def complete(self) -> bool:
        """Whether every blob is there."""
        try:
            return all(blob_path(self.layout, digest).is_file() for digest in self.manifest_blobs())
        except (FileNotFoundError, ValueError, KeyError):
            return False

    def write_archive(self, stream: IO[bytes], *, without: Iterable[str] = ()) -> None:
        """Write the image to *stream* as an OCI archive, leaving out blobs that the reader already has."""
        skip = set(without)
        manifest = blob_path(self.layout, self.digest)
        media_type = json.loads(manifest.read_bytes()).get("mediaType", _MANIFEST)
        annotations = {"io.containerd.image.name": self.reference, "org.opencontainers.image.ref.name": self.reference}
        index = {
            "schemaVersion": 2,
            "mediaType": _INDEX,
            "manifests": [
                {
                    "mediaType": media_type,
                    "digest": self.digest,
                    "size": manifest.stat().st_size,
                    "annotations": annotations,
                }
            ],
        }
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            _add_bytes(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            _add_bytes(archive, "index.json", json.dumps(index).encode())
            # Manifests and configurations are needed to walk the tree; they are small, so they always go along.
            for digest in self.manifest_blobs():
                path = blob_path(self.layout, digest)
                if digest in skip and path.stat().st_size > _CHUNK:
                    continue
                name = "blobs/" + digest.replace(":", "/")
                info = tarfile.TarInfo(name)
                info.size = path.stat().st_size
                with path.open("rb") as handle:
                    archive.addfile(info, handle)


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _walk(layout: Path, digest: str) -> Iterator[str]:
    yield digest
    document = json.loads(blob_path(layout, digest).read_bytes())
    for child in document.get("manifests", []):
        yield from _walk(layout, child["digest"])
    if "config" in document:
        yield document["config"]["digest"]
    for layer in document.get("layers", []):
        yield layer["digest"]


def archive_images(path: Path) -> dict[str, str]:
    """Names and digests of the images in an OCI archive (a tar file with an index.json)."""
    with tarfile.open(path) as archive:
        member = archive.extractfile("index.json")
        if member is None:
            raise ValueError(f"{path} is not an OCI archive: no index.json")
        index = json.loads(member.read())
    found = {}
    for manifest in index["manifests"]:
        annotations = manifest.get("annotations", {})
        name = annotations.get("io.containerd.image.name") or annotations.get("org.opencontainers.image.ref.name")
        if name:
            found[name] = manifest["digest"]
    return found


def prune(layout: Path, keep: Iterable[Image]) -> int:
    """Delete the blobs that no image of *keep* uses; returns the number of bytes freed."""
    used = {blob_path(layout, digest) for image in keep for digest in image.manifest_blobs()}
    freed = 0
    for path in (layout / "blobs").glob("*/*"):
        if path not in used:
            freed += path.stat().st_size
            path.unlink()
    return freed


def write_layer(path: Path, files: Mapping[str, Path]) -> None:
    """Write a layer of *files* (name in the image: file here), with nothing in it that varies from build to build."""
    with tarfile.open(path, "w") as archive:
        for name, source in sorted(files.items()):
            info = archive.gettarinfo(source, arcname=name)
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with source.open("rb") as handle:
                archive.addfile(info, handle)


def only_manifest(layout: Path) -> str:
    """The digest of the only image in a layout."""
    manifests = json.loads((layout / "index.json").read_text())["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"{layout} holds {len(manifests)} images, not one")
    digest: str = manifests[0]["digest"]
    return digest
