"""Control files: whatever the other side leaves there, a reader takes a whole well-formed file, or nothing, or says why not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import Hello, Message, Oracle, ProtocolError, Reason, Release

RELEASE = {"release": True, "host": None, "port": 8000}
ORACLE = {"token_ids": [7], "text": " Paris", "sampled_token_logprob": -0.25, "prompt": "p"}
GOOD: dict[type[Message], dict[str, Any]] = {
    protocol.Hello: {"protocol": 1, "versions": {"vllm": "0.32.0"}, "failed_restores": {"c": "CanaryMismatch: x"}},
    protocol.Start: {
        "mode": "restore",
        "reason": "Usable",
        "content": "c",
        "timeout_s": 5.0,
        "message": "m",
        "attended": True,
        "restore_bytes_per_s": 1 << 30,
    },
    protocol.Hold: {"timeout_s": 30.0},
    protocol.Ready: {
        "token_ids": [7],
        "text": " Paris",
        "sampled_token_logprob": -0.25,
        "more": [ORACLE],
        "bytes_freed": 5,
        "phases": {"engine_s": 1.5},
        "weights": "Keep",
        "weights_reason": "capture.weights is Keep",
        "protocol": 1,
    },
    # Kubernetes allows more in the name of a variable than a shell does.
    protocol.Release: {
        "release": True,
        "host": "::1",
        "port": 8000,
        "env": {"HOSTNAME": "pod", "my-var.x": "1"},
        "attend_end": True,
    },
    protocol.Restored: {"pid": 1001, "content": "c"},
    protocol.Serving: {"host": None, "port": 8000, "oracle": ORACLE, "phases": {"reload_s": 0.5}},
    protocol.Failed: {"reason": Reason.BIND_FAILED, "message": "port 8000"},
    protocol.Ending: {"exit_code": 0, "timeout_s": 7.5},
}
EVERY = sorted(GOOD, key=lambda kind: kind.FILE)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[int]:
    with protocol.open_dir(str(tmp_path)) as fd:
        yield fd


def reason_of(control: int, name: str = protocol.RELEASE) -> str:
    def load() -> None:
        raw = protocol.read(control, name)
        assert raw is not None, "the file was taken for an absent one"
        Release.from_dict(raw)

    with pytest.raises(ProtocolError) as e:
        load()
    assert protocol.RELEASE in e.value.message
    return e.value.reason


def test_every_message_has_a_sample() -> None:
    assert {kind.FILE for kind in GOOD} == set(protocol.ALL_FILES)


@pytest.mark.parametrize("kind", EVERY)
def test_a_message_comes_back_as_it_was_saved(control: int, kind: type[Message]) -> None:
    message = kind.from_dict({"incarnation": "a1", **GOOD[kind]})
    assert message.save(control)
    assert kind.load(control) == message
    assert kind.load(control, "a1") == message


@pytest.mark.parametrize("kind", EVERY)
def test_a_message_of_another_incarnation_is_absent(control: int, kind: type[Message]) -> None:
    kind.from_dict({"incarnation": "old", **GOOD[kind]}).save(control)
    assert kind.load(control, "new") is None


@pytest.mark.parametrize("kind", EVERY)
def test_an_absent_file_is_none(control: int, kind: type[Message]) -> None:
    assert kind.load(control, "a1") is None


def test_unknown_keys_are_ignored() -> None:
    assert Release.from_dict({**RELEASE, "future": [1, 2]}).port == 8000


def test_vllms_marker_has_no_incarnation_and_is_taken(control: int) -> None:
    protocol.write(control, protocol.RELEASE, RELEASE)
    assert Release.load(control, "a1") == Release(incarnation="a1", host=None, port=8000)


def test_a_release_says_host_even_if_it_is_null() -> None:
    assert Release(incarnation="a", host=None, port=1).to_dict()["host"] is None


# --- what is not a small regular file ---


def test_a_symlink_is_refused(control: int, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(json.dumps(RELEASE))
    (tmp_path / protocol.RELEASE).symlink_to("elsewhere")
    assert reason_of(control) == Reason.NOT_REGULAR_FILE


def test_a_dangling_symlink_is_refused_and_not_absent(control: int, tmp_path: Path) -> None:
    (tmp_path / protocol.RELEASE).symlink_to("nowhere")
    assert reason_of(control) == Reason.NOT_REGULAR_FILE


def test_a_directory_is_refused(control: int, tmp_path: Path) -> None:
    (tmp_path / protocol.RELEASE).mkdir()
    assert reason_of(control) == Reason.NOT_REGULAR_FILE


def test_a_fifo_is_refused_without_waiting_for_a_writer(control: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / protocol.RELEASE)
    assert reason_of(control) == Reason.NOT_REGULAR_FILE


def test_a_socket_is_refused(control: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path relative to it is short enough for an address
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(protocol.RELEASE)
        assert reason_of(control) == Reason.NOT_REGULAR_FILE


def test_a_device_is_refused_without_being_opened(control: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Opening one acts: a watchdog starts to count, a tape winds.
    os.mknod(tmp_path / "hello.json", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    real, opened = os.open, []

    def spy(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        opened.append(flags)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)
    with pytest.raises(ProtocolError) as e:
        Hello.load(control)
    assert e.value.reason == Reason.NOT_REGULAR_FILE
    assert opened
    assert all(flags & os.O_PATH for flags in opened)


def test_a_file_that_is_swapped_after_the_check_is_not_read(
    control: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hello.json").write_text('{"incarnation": "a"}')
    (tmp_path / "secret").write_text('{"incarnation": "secret"}')
    real = os.fstat

    def swap(fd: int) -> os.stat_result:
        found = real(fd)
        (tmp_path / "hello.json").unlink(missing_ok=True)
        (tmp_path / "hello.json").symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr(os, "fstat", swap)
    hello = Hello.load(control)
    assert hello is not None
    assert hello.incarnation == "a"


@pytest.mark.parametrize("piece", [b"[", b"{", b"[]", b"[{}],", b'"[",', b'"\\"', b'"', b"\\", b'{"a":'], ids=repr)
def test_what_is_hostile_to_parse_costs_no_more_than_what_is_not(piece: bytes) -> None:
    """Counted in calls of Python code, not in time: nothing may run once per byte."""
    raw = (piece * protocol.MAX_FILE_BYTES)[: protocol.MAX_FILE_BYTES]
    lines = 0

    def count(frame: Any, event: str, _arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename == protocol.__file__ else None

    sys.settrace(count)
    try:
        with pytest.raises(ProtocolError):
            protocol.parse(raw, "x.json")
    finally:
        sys.settrace(None)
    assert lines < 1000


@pytest.mark.parametrize(("depth", "fine"), [(8, True), (100, False)])
@pytest.mark.parametrize("text", ["x", "]]]", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", '\\"[', "{"])
def test_brackets_in_texts_are_no_nesting(depth: int, fine: bool, text: str) -> None:
    value: Any = text
    for _ in range(depth):
        value = [value]
    raw = json.dumps({"a": value}).encode()
    if fine:
        assert protocol.parse(raw, "x.json") == {"a": value}
    else:
        with pytest.raises(ProtocolError):
            protocol.parse(raw, "x.json")


def test_an_oversized_file_is_refused_unparsed(control: int, tmp_path: Path) -> None:
    (tmp_path / protocol.RELEASE).write_bytes(b" " * (protocol.MAX_FILE_BYTES + 1))
    assert reason_of(control) == Reason.TOO_LARGE


def test_the_control_directory_may_not_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError), protocol.open_dir(str(tmp_path / "link")):
        pass


# --- what is not the right JSON ---


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", Reason.NOT_JSON),
        (b"ready", Reason.NOT_JSON),
        (b'{"release": true, "host": null, "po', Reason.NOT_JSON),  # half-written
        (b'{"release": true, "port": 8000} trailing', Reason.NOT_JSON),
        (b"\xff\xfe{}", Reason.NOT_JSON),
        (b'{"release": true, "port": NaN}', Reason.NOT_JSON),
        (b'{"release": true, "port": 8000, "x": Infinity}', Reason.NOT_JSON),
        (b'{"release": true, "port": ' + b"9" * 5000 + b"}", Reason.NOT_JSON),
        (b"[" * 100_000, Reason.NOT_JSON),  # deep nesting, not even closed
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, Reason.NOT_JSON),
        (b"[1]", Reason.NOT_AN_OBJECT),
        (b"true", Reason.NOT_AN_OBJECT),
        (b"null", Reason.NOT_AN_OBJECT),
        (b"{}", Reason.NOT_RELEASED),
        (b'{"release": 1, "port": 8000}', Reason.NOT_RELEASED),
        (b'{"release": "true", "port": 8000}', Reason.NOT_RELEASED),
        (b'{"release": false, "port": 8000}', Reason.NOT_RELEASED),
        (b'{"release": true}', Reason.BAD_PORT),
        (b'{"release": true, "port": true}', Reason.BAD_PORT),
        (b'{"release": true, "port": 0}', Reason.BAD_PORT),
        (b'{"release": true, "port": -1}', Reason.BAD_PORT),
        (b'{"release": true, "port": 65536}', Reason.BAD_PORT),
        (b'{"release": true, "port": 8000.0}', Reason.BAD_PORT),
        (b'{"release": true, "port": "8000"}', Reason.BAD_PORT),
        (b'{"release": true, "port": null}', Reason.BAD_PORT),
        (b'{"release": true, "port": 8000, "host": ""}', Reason.BAD_HOST),
        (b'{"release": true, "port": 8000, "host": 1}', Reason.BAD_HOST),
        (b'{"release": true, "port": 8000, "host": "a b"}', Reason.BAD_HOST),
        (b'{"release": true, "port": 8000, "host": "a\\u0000"}', Reason.BAD_HOST),
        (b'{"release": true, "port": 8000, "env": []}', Reason.BAD_FIELD),
        (b'{"release": true, "port": 8000, "env": {"A": 1}}', Reason.BAD_FIELD),
        (b'{"release": true, "port": 8000, "env": {"A=B": "1"}}', Reason.BAD_FIELD),
        (b'{"release": true, "port": 8000, "env": {"A": "\\u0000"}}', Reason.BAD_FIELD),
        (b'{"release": true, "port": 8000, "env": {"A": "\\ud800"}}', Reason.BAD_FIELD),
        (b'{"release": true, "port": 8000, "incarnation": 5}', Reason.BAD_FIELD),
    ],
    ids=lambda v: v if isinstance(v, str) else v[:44].decode(errors="replace"),
)
def test_a_bad_release_marker_is_refused(control: int, tmp_path: Path, raw: bytes, reason: str) -> None:
    (tmp_path / protocol.RELEASE).write_bytes(raw)
    assert reason_of(control) == reason


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (protocol.Hello, "versions", {"vllm": 1}),
        (protocol.Hello, "protocol", True),
        (protocol.Start, "mode", "warm"),
        (protocol.Start, "mode", None),
        (protocol.Start, "attended", 1),
        (protocol.Start, "restore_bytes_per_s", -1),
        (protocol.Start, "restore_bytes_per_s", 1.5),
        (protocol.Start, "timeout_s", 0),
        (protocol.Start, "timeout_s", 86401),
        (protocol.Start, "timeout_s", 10**400),
        (protocol.Start, "content", "x" * 254),
        (protocol.Hold, "timeout_s", "30"),
        (protocol.Ready, "token_ids", []),
        (protocol.Ready, "token_ids", [True]),
        (protocol.Ready, "token_ids", [-1]),
        (protocol.Ready, "sampled_token_logprob", True),
        (protocol.Ready, "more", [{**ORACLE, "token_ids": "7"}]),
        (protocol.Ready, "phases", {"engine_s": 10**400}),
        (protocol.Restored, "pid", -5),
        (protocol.Restored, "pid", 10.0),
        (protocol.Serving, "port", 0),
        (protocol.Serving, "oracle", None),
        (protocol.Failed, "reason", 5),
        (protocol.Release, "attend_end", 1),
        (protocol.Ending, "exit_code", -1),
        (protocol.Ending, "exit_code", 256),
        (protocol.Ending, "exit_code", False),
        (protocol.Ending, "timeout_s", 0),
    ],
)
def test_a_bad_field_is_named(kind: type[Message], field: str, value: Any) -> None:
    with pytest.raises(ProtocolError) as e:
        kind.from_dict({"incarnation": "a", **GOOD[kind], field: value})
    assert f"{kind.FILE}: {field}" in e.value.message


@pytest.mark.parametrize("kind", [k for k in EVERY if k is not Release])
def test_a_missing_field_is_named(kind: type[Message]) -> None:
    with pytest.raises(ProtocolError) as e:
        kind.from_dict({})
    assert e.value.reason == Reason.MISSING_FIELD
    assert "incarnation" in e.value.message


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
json_values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=8), scalars, max_size=3)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_get_through_but_an_object(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(protocol.parse(raw, "x.json"), dict)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_a_hostile_object_is_a_message_or_a_protocol_error(kind: type[Message], data: st.DataObject) -> None:
    good = {"incarnation": "a", **GOOD[kind]}
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(good)), json_values))
    try:
        message = kind.from_dict({**good, **changed})
    except ProtocolError:
        return
    # What is accepted can be passed on.
    assert kind.from_dict(json.loads(json.dumps(message.to_dict(), allow_nan=False))) == message


# --- writing ---


def test_writing_leaves_no_temporary_file(control: int, tmp_path: Path) -> None:
    protocol.write(control, "a.json", {"n": 1})
    protocol.write(control, "a.json", {"n": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert protocol.read(control, "a.json") == {"n": 2}


def test_writing_replaces_a_symlink_instead_of_following_it(control: int, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / "a.json").symlink_to("victim")
    protocol.write(control, "a.json", {"n": 1})
    assert (tmp_path / "victim").read_text() == "untouched"
    assert protocol.read(control, "a.json") == {"n": 1}


def test_a_value_that_is_no_json_writes_nothing(control: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        protocol.write(control, "a.json", {"n": float("nan")})
    assert not list(tmp_path.iterdir())


def test_the_file_mode_does_not_depend_on_the_umask(control: int, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        protocol.write(control, "a.json", {})
    finally:
        os.umask(old)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644


def test_one_of_many_exclusive_writers_wins(control: int, tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    won: list[int] = []

    def race(n: int) -> None:
        barrier.wait()
        if protocol.write(control, "a.json", {"n": n}, exclusive=True):
            won.append(n)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1
    assert protocol.read(control, "a.json") == {"n": won[0]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_an_exclusive_write_takes_the_place_of_another_incarnations_file(control: int, tmp_path: Path) -> None:
    # A capture that ends after its container has started over writes its release late.
    assert Release(incarnation="old", host=None, port=1).save(control, exclusive=True)
    assert Release(incarnation="new", host=None, port=2).save(control, exclusive=True)
    release = Release.load(control, "new")
    assert release is not None
    assert release.port == 2
    assert not Release(incarnation="new", host=None, port=3).save(control, exclusive=True)
    assert [p.name for p in tmp_path.iterdir()] == ["release.json"]


@pytest.mark.parametrize("content", ['{"release": true, "host": null, "port": 1}', "garbage"])
def test_an_exclusive_write_leaves_what_it_cannot_tell_to_be_old(control: int, tmp_path: Path, content: str) -> None:
    (tmp_path / "release.json").write_text(content)
    assert not Release(incarnation="new", host=None, port=2).save(control, exclusive=True)
    assert (tmp_path / "release.json").read_text() == content


def test_a_file_of_this_incarnation_that_comes_meanwhile_is_not_lost(
    control: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Release(incarnation="old", host=None, port=1).save(control)
    real = os.rename

    def another_is_quicker(src: str, dst: str, **kwargs: Any) -> None:
        monkeypatch.setattr(os, "rename", real)
        Release(incarnation="new", host=None, port=9).save(control)
        real(src, dst, **kwargs)

    monkeypatch.setattr(os, "rename", another_is_quicker)
    assert not Release(incarnation="new", host=None, port=2).save(control, exclusive=True)
    release = Release.load(control, "new")
    assert release is not None
    assert release.port == 9
    assert [p.name for p in tmp_path.iterdir()] == ["release.json"]


def test_removing_what_is_not_there_is_fine(control: int) -> None:
    protocol.remove(control, "a.json")


# --- oracles ---

PARIS = Oracle(token_ids=[7], text=" Paris", sampled_token_logprob=-0.25)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Oracle(token_ids=[7], text=" Paris", sampled_token_logprob=-0.2505), None),
        (Oracle(token_ids=[8], text=" Paris", sampled_token_logprob=-0.25), "token ids"),
        (Oracle(token_ids=[7, 7], text=" Paris", sampled_token_logprob=-0.25), "token ids"),
        (Oracle(token_ids=[7], text=" Rome", sampled_token_logprob=-0.25), "text"),
        (Oracle(token_ids=[7], text=" Paris", sampled_token_logprob=-0.2512), "logprob"),
        (Oracle(token_ids=[7], text=" Paris", sampled_token_logprob=float("nan")), "logprob"),
        (Oracle(token_ids=[7], text=" Paris", sampled_token_logprob=float("inf")), "logprob"),
    ],
)
def test_answers_are_equal_or_it_says_where_not(other: Oracle, says: str | None) -> None:
    difference = PARIS.differs(other)
    assert difference is None if says is None else says in (difference or "")
