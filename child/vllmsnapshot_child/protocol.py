"""The control volume: the files by which the node agent, PID 1 (`init`) and the engine server talk.

One directory per pod (an emptyDir, mounted at `/run/vllmsnapshot`), one JSON object per file:

    hello.json     init   -> agent    a container has started and waits for a decision
    start.json     agent  -> init     the decision: cold, restore or refuse
    hold.json      agent  -> init     a capture is running: the barrier may last longer
    ready.json     server -> agent    the engine is proven and waits at the barrier
    release.json   agent  -> server   leave the barrier and serve on this port
    restored.json  agent  -> init     CRIU has put the tree back; this is its root
    serving.json   server -> agent    proven again and bound
    failed.json    server -> agent    why the engine gave up
    ending.json    server -> agent    all requests are answered and the engine may be killed; init exits with the code in it

Writers write a temporary name, fsync and rename, so that a reader sees a whole file or none. Readers trust nothing: the
other side may be hostile (a workload) or dead half-way. `read` opens relative to a directory descriptor without following
links, takes regular files of bounded size only, and every field is checked here and nowhere else.

`incarnation` is a random word, new each time init starts. emptyDir volumes survive a container restart, and a restored
process carries the memory of another pod; a file of another incarnation is therefore a file that is not there.

`ready.json` and `release.json` are a superset of what vLLM's own `python -m vllm.snapshot.server` writes and reads
(three oracle fields; `release`, `host`, `port`), so that either side can be vLLM's. Keys nobody knows are ignored, as there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self, TypeVar

PROTOCOL_VERSION = 1
"""Raised when a file changes its meaning. The agent answers a version it does not know with an unattended cold start."""

CONTROL_DIR = "/run/vllmsnapshot"
"""Where the control volume is mounted in the engine container."""

MAX_FILE_BYTES = 1 << 20
"""No control file is near this size (bytes); a larger one is refused unread."""

MAX_ENV_CHARS = 131072
"""A longer variable starts no process (MAX_ARG_STRLEN of Linux); the value of an annotation may come near."""

MAX_DEPTH = 16
"""Nesting that a control file may have; deeper JSON is refused before the parser recurses."""

TERM_GRACE = "VLLMSNAPSHOT_TERM_GRACE_S"
TERM_GRACE_S = 25.0
"""Environment and default: seconds from SIGTERM until init kills what is left."""

ENDING_FRACTION = 0.3
"""The share of the grace time that a server waits, after its requests, for the agent to end it (7.5 of 25 s). Lock and checkpoint of
an engine that has dropped its memory move little. The requests have the rest."""

HELLO, START, HOLD, READY, RELEASE, RESTORED, SERVING, FAILED, ENDING = (
    "hello.json",
    "start.json",
    "hold.json",
    "ready.json",
    "release.json",
    "restored.json",
    "serving.json",
    "failed.json",
    "ending.json",
)
ALL_FILES = (HELLO, START, HOLD, READY, RELEASE, RESTORED, SERVING, FAILED, ENDING)


class Reason:
    """Why a marker was refused or an engine gave up. These words appear in events, conditions and docs: never reworded."""

    NOT_REGULAR_FILE = "NotARegularFile"
    TOO_LARGE = "FileTooLarge"
    NOT_JSON = "NotJSON"
    NOT_AN_OBJECT = "NotAnObject"
    MISSING_FIELD = "MissingField"
    BAD_FIELD = "BadField"
    OTHER_INCARNATION = "OtherIncarnation"
    NOT_RELEASED = "NotReleased"
    BAD_PORT = "BadPort"
    BAD_HOST = "BadHost"

    RELEASE_TIMEOUT = "ReleaseTimeout"
    CANARY_MISMATCH = "CanaryMismatch"
    CANARY_FAILED = "CanaryFailed"
    REHEARSAL_MISMATCH = "RehearsalMismatch"
    RELOAD_FAILED = "ReloadFailed"
    ENGINE_FAILED = "EngineFailed"
    BIND_FAILED = "BindFailed"
    BAD_ARGUMENTS = "BadArguments"


EXIT_CODES = {
    Reason.BAD_ARGUMENTS: 64,
    Reason.ENGINE_FAILED: 70,
    Reason.CANARY_FAILED: 71,
    Reason.REHEARSAL_MISMATCH: 72,
    Reason.RELEASE_TIMEOUT: 73,
    Reason.RELOAD_FAILED: 74,
    Reason.CANARY_MISMATCH: 75,
    Reason.BIND_FAILED: 76,
    Reason.NOT_REGULAR_FILE: 80,
    Reason.TOO_LARGE: 81,
    Reason.NOT_JSON: 82,
    Reason.NOT_AN_OBJECT: 83,
    Reason.MISSING_FIELD: 84,
    Reason.BAD_FIELD: 85,
    Reason.OTHER_INCARNATION: 86,
    Reason.NOT_RELEASED: 87,
    Reason.BAD_PORT: 88,
    Reason.BAD_HOST: 89,
}
"""Exit code by reason: 64-79 the engine, 80-89 a bad release marker. 78 is init's (a refused start)."""


class ProtocolError(Exception):
    """A control file cannot be believed. `reason` is a `Reason` constant, `message` names the file and the field."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


# --- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_dir(path: str) -> Iterator[int]:
    """Open a control directory for `read`, `write` and `remove`; a symlink in its last component is refused (OSError)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def read(dir_fd: int, name: str) -> dict[str, Any] | None:
    """The object in file `name`, or None if there is no such file.

    Raises ProtocolError for anything that is not a small regular file holding one JSON object. The file is pinned before it is
    opened: opening a device or a FIFO acts on it, and nothing can be swapped in between the check and the open.
    """
    try:
        pinned = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(pinned).st_mode):
            raise ProtocolError(Reason.NOT_REGULAR_FILE, f"{name} is not a regular file")
        try:
            # The magic link is the pinned file itself, not its name.
            with open(f"/proc/self/fd/{pinned}", "rb") as f:
                raw = f.read(MAX_FILE_BYTES + 1)
        except PermissionError as e:
            raise ProtocolError(Reason.NOT_REGULAR_FILE, f"{name} cannot be read: {e.strerror}") from e
    finally:
        os.close(pinned)
    if len(raw) > MAX_FILE_BYTES:
        raise ProtocolError(Reason.TOO_LARGE, f"{name} is larger than {MAX_FILE_BYTES} bytes")
    return parse(raw, name)


def parse(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object in `raw`. NaN and infinities are refused (they are not JSON), and so is deep nesting."""
    if _too_deep(raw):
        raise ProtocolError(Reason.NOT_JSON, f"{name} is no JSON, or nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(Reason.NOT_JSON, f"{name} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ProtocolError(Reason.NOT_AN_OBJECT, f"{name} holds a {type(value).__name__}, not an object")
    return value


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _too_deep(raw: bytes) -> bool:
    """Whether JSON is nested deeper than MAX_DEPTH. In time linear in its size: the text may be hostile, the reader is shared."""
    left = _TEXT.sub(b"", raw).translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    return bool(left)


def write(dir_fd: int, name: str, value: Mapping[str, Any], *, exclusive: bool = False, mode: int = 0o644) -> bool:
    """Publish `value` as file `name`: whole, durable, atomic. Returns False if `exclusive` and the file was there already.

    `exclusive` decides a race between two writers (init and agent may both release a server): link(2) lets one win.
    """
    tmp = f".{name}.{os.urandom(6).hex()}.tmp"
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            # The workload may run as any user, the agent as root: the umask of neither may decide who can read.
            os.fchmod(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        if exclusive:
            try:
                os.link(tmp, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
            except FileExistsError:
                return False
            finally:
                os.unlink(tmp, dir_fd=dir_fd)
        else:
            os.rename(tmp, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(tmp, dir_fd=dir_fd)
        raise
    os.fsync(dir_fd)
    return True


def _displace(dir_fd: int, name: str, incarnation: str) -> bool:
    """Remove a file of another incarnation, which a slow writer left after the container had started over.

    False if the file is of this incarnation, or cannot be believed; it then stays. The file is taken out of the way before it is
    looked at again, so that one which appears meanwhile is put back and not lost.
    """
    try:
        raw = read(dir_fd, name)
        if raw is not None and raw.get("incarnation", incarnation) == incarnation:
            return False
        aside = f".{name}.{os.urandom(6).hex()}.tmp"
        try:
            os.rename(name, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except FileNotFoundError:
            return True
        raw = read(dir_fd, aside) or {}
        if raw.get("incarnation", incarnation) == incarnation:
            with contextlib.suppress(FileExistsError):
                os.link(aside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        os.unlink(aside, dir_fd=dir_fd)
    except ProtocolError:
        return False
    return True


def remove(dir_fd: int, name: str) -> None:
    """Remove a control file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


# --- messages --------------------------------------------------------------------------------------------------------

M = TypeVar("M", bound="Message")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A control file as a value: `load` and `save` move it, `from_dict` checks every field."""

    FILE: ClassVar[str]
    incarnation: str

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Build from a parsed file. Raises ProtocolError that names file and field; unknown keys are ignored."""
        checks = _CHECKS[cls]
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in raw:
                values[f.name] = checks[f.name](raw[f.name], f"{cls.FILE}: {f.name}")
        try:
            return cls(**values)
        except TypeError:
            missing = [f.name for f in fields(cls) if f.name not in values and _required(f)]
            raise ProtocolError(Reason.MISSING_FIELD, f"{cls.FILE}: {', '.join(missing)} missing") from None

    @classmethod
    def load(cls, dir_fd: int, incarnation: str | None = None) -> Self | None:
        """The message in its file; None if absent or, where `incarnation` is given, of another incarnation."""
        raw = read(dir_fd, cls.FILE)
        if raw is None:
            return None
        if incarnation is not None and raw.get("incarnation", incarnation) != incarnation:
            return None
        return cls.from_dict({"incarnation": incarnation or "", **raw})

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object; fields that are None are left out, except a release marker's `host`, which vLLM requires."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in out.items() if v is not None or k == "host"}

    def save(self, dir_fd: int, *, exclusive: bool = False) -> bool:
        """Write the file (see `write`). With `exclusive`, one of another incarnation is in nobody's way: it is not there."""
        while not write(dir_fd, self.FILE, self.to_dict(), exclusive=exclusive):
            if not _displace(dir_fd, self.FILE, self.incarnation):
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """A container has started. `failed_restores` are the contents that this container already failed to come up from."""

    FILE = HELLO
    protocol: int = PROTOCOL_VERSION
    versions: dict[str, str] = field(default_factory=dict)
    failed_restores: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start(Message):
    """The agent's decision.

    `cold`: start the engine; with `attended` it stops at the barrier and somebody will release it. `restore_bytes_per_s` is what
    restores on this node moved so far, absent if there was none: the server weighs it where the weights are `Auto`.
    `restore`: a tree will appear; wait `timeout_s` for `restored.json`, or for a later decision in this same file.
    `refuse`: exit; the snapshot's policy forbids a cold start here.
    """

    FILE = START
    mode: str
    reason: str
    message: str = ""
    attended: bool = False
    content: str | None = None
    timeout_s: float = 120.0
    restore_bytes_per_s: int | None = None


@dataclass(frozen=True, kw_only=True)
class Hold(Message):
    """A capture runs: init must not release the server by itself before `timeout_s` seconds have passed since it saw this."""

    FILE = HOLD
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What the engine answered to one prompt; equality is the proof that memory, weights and code are those of the capture."""

    token_ids: list[int]
    text: str
    sampled_token_logprob: float
    prompt: str = ""

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> Oracle:
        """Build from JSON. Raises ProtocolError that names the field."""
        if not isinstance(raw, Mapping):
            raise ProtocolError(Reason.BAD_FIELD, f"{where} must be an object")
        for name in ("token_ids", "text", "sampled_token_logprob"):
            if name not in raw:
                raise ProtocolError(Reason.MISSING_FIELD, f"{where}.{name} missing")
        ids = raw["token_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ProtocolError(Reason.BAD_FIELD, f"{where}.token_ids must be a non-empty list of token ids")
        return cls(
            token_ids=list(ids),
            text=_text(raw["text"], f"{where}.text"),
            sampled_token_logprob=_number(raw["sampled_token_logprob"], f"{where}.sampled_token_logprob"),
            prompt=_text(raw.get("prompt", ""), f"{where}.prompt"),
        )

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "sampled_token_logprob": self.sampled_token_logprob,
            "prompt": self.prompt,
        }

    def differs(self, other: Oracle, logprob_tolerance: float = 1e-3) -> str | None:
        """Why `other` is not the same answer, or None. Ids and text must be equal, the logprob within the tolerance.

        1e-3 is the tolerance of vLLM's own snapshot child. A NaN never compares equal.
        """
        if self.token_ids != other.token_ids:
            return f"token ids {other.token_ids} instead of {self.token_ids}"
        if self.text != other.text:
            return f"text {other.text!r} instead of {self.text!r}"
        if not abs(self.sampled_token_logprob - other.sampled_token_logprob) <= logprob_tolerance:
            return f"logprob {other.sampled_token_logprob} instead of {self.sampled_token_logprob}"
        return None


@dataclass(frozen=True, kw_only=True)
class Ready(Message):
    """The engine waits at the barrier. The first three fields are vLLM's; `more` holds the oracles of further prompts.

    `weights` is Discard or Keep, as it was done, and `weights_reason` why; empty if the server does not say.
    """

    FILE = READY
    token_ids: list[int]
    text: str
    sampled_token_logprob: float
    more: list[dict[str, Any]] = field(default_factory=list)
    bytes_freed: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    weights: str = ""
    weights_reason: str = ""
    protocol: int | None = None  # absent: vLLM's own snapshot child, which writes no serving.json

    @property
    def oracle(self) -> Oracle:
        """The first prompt's answer."""
        return Oracle(token_ids=self.token_ids, text=self.text, sampled_token_logprob=self.sampled_token_logprob)


@dataclass(frozen=True, kw_only=True)
class Release(Message):
    """Leave the barrier. `env` is merged into the server's environment before it reloads (a restored one has another pod's).

    `attend_end`: the agent wants to end the engine itself (see Ending), as its state on a GPU was put back by the driver.
    """

    FILE = RELEASE
    release: bool = True
    host: str | None
    port: int
    env: dict[str, str] = field(default_factory=dict)
    attend_end: bool = False

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Release:
        """As vLLM checks it: `release` must be JSON true (not 1), `port` an integer (not true, not 8000.0) in 1..65535."""
        if raw.get("release") is not True:
            raise ProtocolError(Reason.NOT_RELEASED, f"{RELEASE}: release must be JSON true")
        port = raw.get("port")
        if type(port) is not int or not 1 <= port <= 65535:
            raise ProtocolError(Reason.BAD_PORT, f"{RELEASE}: port must be an integer in 1..65535")
        host = raw.get("host")
        if host is not None and (not isinstance(host, str) or not _HOST.fullmatch(host)):
            raise ProtocolError(Reason.BAD_HOST, f"{RELEASE}: host must be null or a host name")
        env = _environment(raw.get("env", {}), f"{RELEASE}: env")
        return cls(
            incarnation=_word(raw.get("incarnation", ""), f"{RELEASE}: incarnation"),
            host=host,
            port=port,
            env=env,
            attend_end=_flag(raw.get("attend_end", False), f"{RELEASE}: attend_end"),
        )


@dataclass(frozen=True, kw_only=True)
class Restored(Message):
    """CRIU has finished. `pid` is the root of the tree in the container's PID namespace."""

    FILE = RESTORED
    pid: int
    content: str


@dataclass(frozen=True, kw_only=True)
class Serving(Message):
    """Proven and bound. `oracle` is the answer after release; the agent compares it with the recorded one again."""

    FILE = SERVING
    host: str | None
    port: int
    oracle: dict[str, Any]
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """The engine gave up before it served. `reason` is a `Reason` constant."""

    FILE = FAILED
    reason: str
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Ending(Message):
    """The server was told to end, and nothing of it is needed any more. It waits `timeout_s` seconds to be killed by the agent,
    which lets go of the GPU first, and then ends by itself. Either way the container's exit code is `exit_code`."""

    FILE = ENDING
    exit_code: int
    timeout_s: float


# --- field checks ----------------------------------------------------------------------------------------------------

_HOST = re.compile(r"[0-9A-Za-z.:%_-]{1,253}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENV_NAME = re.compile(r"[^=\0]+")


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _word(value: Any, where: str) -> str:
    return _string(value, where, 253)


def _text(value: Any, where: str) -> str:
    return _string(value, where, 65536)


def _string(value: Any, where: str, limit: int) -> str:
    # JSON can spell half a surrogate pair; such a string cannot be printed, stored or sent on.
    if not isinstance(value, str) or len(value) > limit or _SURROGATE.search(value):
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be a string of at most {limit} characters")
    return value


def _maybe_word(value: Any, where: str) -> str | None:
    return None if value is None else _word(value, where)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be true or false")
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be a non-negative integer")
    return value


def _maybe_count(value: Any, where: str) -> int | None:
    return None if value is None else _count(value, where)


def _number(value: Any, where: str) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer of 400 digits is JSON
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be a finite number")
    return number


def _seconds(value: Any, where: str) -> float:
    number = _number(value, where)
    if not 0 < number <= 86400:
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be in 0..86400 seconds")
    return number


def _exit_code(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= 255:
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be an integer in 0..255")
    return value


def _port(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= 65535:
        raise ProtocolError(Reason.BAD_PORT, f"{where} must be an integer in 1..65535")
    return value


def _mode(value: Any, where: str) -> str:
    if value not in ("cold", "restore", "refuse"):
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be cold, restore or refuse")
    return str(value)


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value or len(value) > 4096 or not all(type(i) is int and i >= 0 for i in value):
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be a non-empty list of token ids")
    return list(value)


def _oracles(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > 64:
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be a list of at most 64 oracles")
    return [Oracle.from_dict(item, f"{where}[{i}]").to_dict() for i, item in enumerate(value)]


def _oracle(value: Any, where: str) -> dict[str, Any]:
    return Oracle.from_dict(value, where).to_dict()


def _str_map(value: Any, where: str, limit: int = 65536) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > 1024:
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be an object of strings")
    return {_word(k, f"{where} key"): _string(v, f"{where}.{k}", limit) for k, v in value.items()}


def _environment(value: Any, where: str) -> dict[str, str]:
    env = _str_map(value, where, MAX_ENV_CHARS)
    for name, text in env.items():
        # What setenv(3) would refuse in the midst of a release is refused here. (Kubernetes has names with dots and dashes.)
        if not _ENV_NAME.fullmatch(name) or "\0" in text:
            raise ProtocolError(Reason.BAD_FIELD, f"{where}.{name!a} is not an environment variable")
    return env


def _num_map(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or len(value) > 256:
        raise ProtocolError(Reason.BAD_FIELD, f"{where} must be an object of numbers")
    return {_word(k, f"{where} key"): _number(v, f"{where}.{k}") for k, v in value.items()}


_CHECKS: dict[type[Message], dict[str, Any]] = {
    Hello: {"incarnation": _word, "protocol": _count, "versions": _str_map, "failed_restores": _str_map},
    Start: {
        "incarnation": _word,
        "mode": _mode,
        "reason": _word,
        "message": _text,
        "attended": _flag,
        "content": _maybe_word,
        "timeout_s": _seconds,
        "restore_bytes_per_s": _maybe_count,
    },
    Hold: {"incarnation": _word, "timeout_s": _seconds},
    Ready: {
        "incarnation": _word,
        "token_ids": _ids,
        "text": _text,
        "sampled_token_logprob": _number,
        "more": _oracles,
        "bytes_freed": _count,
        "phases": _num_map,
        "weights": _word,
        "weights_reason": _text,
        "protocol": _maybe_count,
    },
    Restored: {"incarnation": _word, "pid": _count, "content": _word},
    Serving: {"incarnation": _word, "host": _maybe_word, "port": _port, "oracle": _oracle, "phases": _num_map},
    Failed: {"incarnation": _word, "reason": _word, "message": _text},
    Ending: {"incarnation": _word, "exit_code": _exit_code, "timeout_s": _seconds},
}
