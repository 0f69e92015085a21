"""The parts of the local cluster that decide without a cluster: cache keys, publication, process identity, images."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import build, cache, config, gpus, oci
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.images import RECIPES, ROOT
from tests.cluster.process import ProcessRecord, run, start_time


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the real cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllmsnapshot"


class TestDigest:
    def test_parts_do_not_run_together(self) -> None:
        assert cache.digest("ab", "c") != cache.digest("a", "bc")

    def test_text_and_its_bytes_are_the_same(self) -> None:
        assert cache.digest("ä") == cache.digest("ä".encode())

    def test_a_tree_is_known_by_names_contents_and_exec_bits(self, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        tree.mkdir()
        file = tree / "a.py"
        file.write_text("1")
        seen = {cache.digest(tree)}
        file.write_text("2")
        seen.add(cache.digest(tree))
        file.chmod(0o755)
        seen.add(cache.digest(tree))
        file.rename(tree / "b.py")
        seen.add(cache.digest(tree))
        assert len(seen) == 4

    def test_byte_code_does_not_count(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("1")
        before = cache.digest(tmp_path)
        (tmp_path / "__pycache__").mkdir()
        (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\0")
        assert cache.digest(tmp_path) == before

    def test_times_do_not_count(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("1")
        before = cache.digest(tmp_path)
        os.utime(tmp_path / "a", (1, 1))
        assert cache.digest(tmp_path) == before

    def test_a_missing_file_is_not_an_empty_one(self, tmp_path: Path) -> None:
        missing = cache.digest(tmp_path / "a")
        (tmp_path / "a").touch()
        assert cache.digest(tmp_path / "a") != missing


class TestPublish:
    def test_builds_once(self, tmp_path: Path) -> None:
        calls: list[Path] = []

        def make(directory: Path) -> None:
            calls.append(directory)
            (directory / "f").write_text("x")

        first = cache.publish("thing", "k" * 64, make, root=tmp_path)
        assert cache.publish("thing", "k" * 64, make, root=tmp_path) == first
        assert (first / "f").read_text() == "x"
        assert len(calls) == 1

    def test_another_key_is_another_directory(self, tmp_path: Path) -> None:
        first = cache.publish("thing", "a" * 64, lambda _: None, root=tmp_path)
        assert cache.publish("thing", "b" * 64, lambda _: None, root=tmp_path) != first

    def test_nothing_is_visible_before_the_end_or_after_a_failure(self, tmp_path: Path) -> None:
        def fail(directory: Path) -> None:
            (directory / "half").touch()
            assert not (tmp_path / "thing-kkkkkkkkkkkkkkkk").exists()
            raise RuntimeError

        with pytest.raises(RuntimeError):
            cache.publish("thing", "k" * 64, fail, root=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["locks"]

    def test_the_remains_of_a_killed_build_are_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".tmp-thing-0000000000000000").mkdir()
        cache.publish("thing", "k" * 64, lambda _: None, root=tmp_path)
        assert not list(tmp_path.glob(".tmp-*"))

    def test_two_at_once_build_once(self, tmp_path: Path) -> None:
        entered, calls = threading.Event(), []

        def make(_: Path) -> None:
            calls.append(1)
            entered.set()
            waited.wait(5)

        waited = threading.Event()
        results: list[Path] = []

        def work() -> None:
            results.append(cache.publish("thing", "k" * 64, make, root=tmp_path, on_wait=waited.set))

        threads = [threading.Thread(target=work) for _ in range(2)]
        threads[0].start()
        assert entered.wait(5)
        threads[1].start()
        for thread in threads:
            thread.join(10)
        assert calls == [1]
        assert len(set(results)) == 1

    def test_a_lock_is_given_up_by_a_process_that_is_killed(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        held = context.Event()
        holder = context.Process(target=_hold, args=(tmp_path, held))
        holder.start()
        assert held.wait(20)
        holder.kill()
        with cache.lock("name", tmp_path):
            pass
        holder.join(10)

    @pytest.mark.parametrize("place", ["/run/x", "/var/lib/x"])
    def test_a_cache_that_the_cluster_would_hide_is_refused(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
            cache.cache_root()


def _hold(root: Path, held: object) -> None:
    with cache.lock("name", root):
        held.set()  # type: ignore[attr-defined]
        threading.Event().wait()


class TestProcessRecord:
    def test_knows_itself(self) -> None:
        assert ProcessRecord.of(os.getpid()).alive()

    def test_survives_a_file(self, tmp_path: Path) -> None:
        record = ProcessRecord.of(os.getpid())
        record.save(tmp_path / "r")
        assert ProcessRecord.load(tmp_path / "r") == record

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "started": 1, "boot": "b"}'])
    def test_an_unreadable_record_is_none(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "r").write_text(text)
        assert ProcessRecord.load(tmp_path / "r") is None

    def test_a_missing_record_is_none(self, tmp_path: Path) -> None:
        assert ProcessRecord.load(tmp_path / "r") is None

    def test_a_successor_with_the_same_pid_is_someone_else(self) -> None:
        with subprocess.Popen(["sleep", "60"]) as process:
            try:
                real = ProcessRecord.of(process.pid)
                for impostor in (replace(real, started=real.started + 1), replace(real, boot="another boot")):
                    assert not impostor.alive()
                    impostor.kill()
                assert process.poll() is None
                assert real.alive()
            finally:
                process.kill()

    def test_kill_ends_it_and_may_be_repeated(self) -> None:
        with subprocess.Popen(["sleep", "60"]) as process:
            record = ProcessRecord.of(process.pid)
            record.kill()
            # A zombie until it is waited for, and a zombie counts as gone.
            assert not record.alive()
            record.kill()

    def test_names_with_blanks_and_parentheses(self, tmp_path: Path) -> None:
        program = tmp_path / "a ) b"
        program.symlink_to("/bin/sleep")
        with subprocess.Popen([program, "60"]) as process:
            try:
                assert start_time(process.pid) is not None
            finally:
                process.kill()

    def test_no_process(self) -> None:
        with pytest.raises(ProcessLookupError):
            ProcessRecord.of(2**22 + 1)


class TestRun:
    def test_a_failure_tells_the_command_and_its_last_words(self) -> None:
        with pytest.raises(ClusterError, match=r"exit status 3: sh -c .*\nlast words"):
            run(["sh", "-c", "echo last words >&2; exit 3"])

    def test_a_missing_program(self) -> None:
        with pytest.raises(ClusterError, match="not found: no-such-program"):
            run(["no-such-program"])

    def test_a_timeout(self) -> None:
        with pytest.raises(ClusterError, match="timed out"):
            run(["sleep", "60"], timeout=0.1)


class TestImages:
    def make(self, directory: Path, content: bytes = b"x") -> oci.Image:
        source = directory / "source"
        source.write_bytes(content)
        layer = directory / "layer.tar"
        oci.write_layer(layer, {"file": source})
        layout = directory / "layout"
        return oci.Image("example.local/a:1", layout, oci.write_image(layout, layer, {"Cmd": ["/file"]}))

    def test_equal_content_is_an_equal_digest(self, tmp_path: Path) -> None:
        for name in ("1", "2"):
            (tmp_path / name).mkdir()
        assert self.make(tmp_path / "1").digest == self.make(tmp_path / "2").digest

    def test_an_archive_tells_its_names(self, tmp_path: Path) -> None:
        image = self.make(tmp_path)
        with (tmp_path / "a.tar").open("wb") as stream:
            image.write_archive(stream)
        assert oci.archive_images(tmp_path / "a.tar") == {image.reference: image.digest}

    def test_only_large_blobs_are_left_out(self, tmp_path: Path) -> None:
        image = self.make(tmp_path, b"x" * (2 << 20))
        stream = io.BytesIO()
        image.write_archive(stream, without=image.manifest_blobs())
        stream.seek(0)
        with tarfile.open(fileobj=stream) as archive:
            blobs = [name for name in archive.getnames() if name.startswith("blobs/")]
        assert len(image.manifest_blobs()) == 3
        assert len(blobs) == 2

    def test_a_lost_blob_makes_it_incomplete(self, tmp_path: Path) -> None:
        image = self.make(tmp_path)
        assert image.complete()
        oci.blob_path(image.layout, image.manifest_blobs()[-1]).unlink()
        assert not image.complete()

    def test_prune_keeps_what_is_used(self, tmp_path: Path) -> None:
        old = self.make(tmp_path, b"old")
        new = self.make(tmp_path, b"new")
        assert oci.prune(tmp_path / "layout", [new]) > 0
        assert new.complete()
        assert not old.complete()

    def test_recipes_name_what_they_need(self) -> None:
        for recipe in RECIPES.values():
            assert (ROOT / recipe.dockerfile).is_file()
            assert recipe.base is None or recipe.base in RECIPES


class TestConfiguration:
    def test_every_pinned_module_has_its_sums(self) -> None:
        for group in build.GROUPS:
            assert (group.module / "go.sum").is_file()

    def test_flags_are_part_of_the_key(self) -> None:
        group = build.HELM
        other = replace(group, targets=(replace(group.targets[0], ldflags="-w"),))
        assert group.key() != other.key()

    def test_the_version_is_the_pinned_one(self) -> None:
        text = (build.KUBERNETES.module / "go.mod").read_text()
        assert f"k8s.io/kubernetes v{build.KUBERNETES_VERSION}" in text

    def test_two_clusters_do_not_share_a_cgroup(self, tmp_path: Path) -> None:
        paths = config.Paths(tmp_path)
        roots = {config.kubelet(paths, name)["cgroupRoot"] for name in ("a", "b")}
        assert roots == {"/a", "/b"}

    def test_daemons_are_told_only_of_files_in_the_run(self, tmp_path: Path) -> None:
        config.write_files(config.Paths(tmp_path), "g", None)
        assert not (tmp_path / "kubelet.json").exists()
        (tmp_path / "containerd").symlink_to(tmp_path / "slot")
        config.write_files(config.Paths(tmp_path), "g", tmp_path / "bin")
        assert json.loads((tmp_path / "kubelet.json").read_text())["kind"] == "KubeletConfiguration"
        assert str(tmp_path / "slot") in (tmp_path / "containerd.toml").read_text()

    def test_a_container_gets_the_files_of_its_own_gpu_only(self, tmp_path: Path) -> None:
        made = gpus.offer(tmp_path, tmp_path / "lib", 2, frozenset({1}))
        shared = {m["container"]: m["readOnly"] for m in made["mounts"]}
        assert shared == {"/dev/nvidiactl": False, "/dev/nvidia-uvm": False, gpus.LIBRARIES: True}
        assert [(d["id"], d["healthy"]) for d in made["devices"]] == [(gpus.Gpus.uuid(0), True), (gpus.Gpus.uuid(1), False)]
        for number, device in enumerate(made["devices"]):
            (mount,) = device["mounts"]
            assert (mount["host"], mount["container"]) == (str(tmp_path / f"gpu{number}"), f"/dev/nvidia{number}")
        # The agent's side of the fake driver is for the agent alone.
        assert "FAKE" not in json.dumps(made["env"])

    @pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a--b", "a/b", "..", "x" * 41])
    def test_bad_names(self, name: str) -> None:
        with pytest.raises(ClusterError, match="not a cluster name"):
            Cluster(name)

    def test_a_path_too_long_for_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 60)
        with pytest.raises(ClusterError, match="too long"):
            Cluster("a")

    def test_the_box_needs_the_standard_library_only(self) -> None:
        script = ROOT / "tests" / "cluster" / "box.py"
        code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='box')"
        subprocess.run([sys.executable, "-I", "-S", "-c", code, script], check=True)
