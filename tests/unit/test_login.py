"""What kopf is given to log in with, and how long it waits for it: never what was refused, never at once again and again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import kopf
import pytest

from vllmsnapshot.controller.app import Operator, Options
from vllmsnapshot.controller.login import PROVEN_S, VALID, Login, Refusals, service_account, source
from vllmsnapshot.kube import Kube

INSIDE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
REFUSES = "the API server refuses our credentials (401)"


class Lab:
    """A handler whose time goes on only as the test says, or while it sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.token = "one"
        self.broken: list[Exception] = []
        """What reading raises, one a time."""
        self.pauses: list[float] = []
        self.login = Login(self.read, clock=lambda: self.time, now=self.now, sleep=self.sleep)

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.time)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds

    def read(self, **_: object) -> kopf.ConnectionInfo:
        if self.broken:
            raise self.broken.pop(0)
        return kopf.ConnectionInfo(server="https://x", token=self.token)

    async def given(self, after: float = 0.01) -> kopf.ConnectionInfo:
        """kopf asks, so many seconds after it was answered last."""
        self.time += after
        return await self.login()


@pytest.fixture
def lab() -> Lab:
    return Lab()


async def test_the_first_login_waits_for_nothing(lab: Lab) -> None:
    found = await lab.given()
    assert (found.token, found.expiration) == ("one", lab.now() + VALID)
    assert lab.pauses == []
    assert lab.login.trouble() is None


async def test_what_was_refused_comes_back_as_something_else_and_later_each_time(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """kopf compares: it takes nothing that equals what was refused."""
    found = [await lab.given() for _ in range(9)]
    assert all(x != y for i, x in enumerate(found) for y in found[:i])
    assert lab.pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert caplog.messages[0] == f"{REFUSES}, 1 times by now; the next try is in 1 s"
    assert len(caplog.messages) == 8


async def test_credentials_that_were_accepted_end_the_row(lab: Lab) -> None:
    for _ in range(4):
        await lab.given()
    trouble = lab.login.trouble()
    assert trouble is not None
    assert trouble.startswith(REFUSES)
    lab.time += PROVEN_S
    assert lab.login.trouble() is None
    lab.pauses.clear()
    await lab.given()
    await lab.given()
    assert lab.pauses == [1, 2]


async def test_expired_credentials_are_read_again_at_once(lab: Lab) -> None:
    await lab.given()
    lab.token = "two"
    assert (await lab.given(after=VALID.total_seconds())).token == "two"
    assert (await lab.given(after=VALID.total_seconds())).token == "two"
    assert lab.pauses == []
    assert lab.login.trouble() is None


async def test_what_was_refused_once_and_then_good_is_no_trouble_at_the_next_login(lab: Lab) -> None:
    await lab.given()
    await lab.given()
    await lab.given(after=VALID.total_seconds())
    assert lab.login.trouble() is None
    lab.pauses.clear()
    await lab.given()
    assert lab.pauses == [1]


async def test_a_token_that_was_rotated_meanwhile_is_tried_at_once(lab: Lab) -> None:
    await lab.given()
    lab.token = "two"
    assert (await lab.given()).token == "two"
    assert lab.pauses == []
    await lab.given()
    assert lab.pauses == [2], "it was refused, too"


async def test_a_token_that_is_rotated_during_the_pause_is_the_one_that_is_tried(lab: Lab) -> None:
    await lab.given()
    sleep = lab.sleep

    async def rotate(seconds: float) -> None:
        lab.token = "two"
        await sleep(seconds)

    lab.login._sleep = rotate
    assert (await lab.given()).token == "two"


async def test_credentials_that_cannot_be_read_are_waited_for(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.broken = [FileNotFoundError("token"), ValueError("empty"), KeyError("contexts")]
    assert (await lab.given()).token == "one"
    assert lab.pauses == [1, 2, 4]
    assert "FileNotFoundError: token" in caplog.messages[0]
    assert "KeyError" in str(lab.login.trouble())


def test_a_row_of_refusals_is_over_when_the_last_answer_to_it_must_have_come() -> None:
    row = Refusals().another(0.0)
    assert row.pause_s == 1.0
    assert not row.over(1e9), "nothing has been handed out since"
    given = Refusals(number=3, since=0.0, given=10.0)
    assert not given.over(10.0 + PROVEN_S - 0.1)
    assert given.another(10.0) == Refusals(number=4, since=0.0)
    assert given.over(10.0 + PROVEN_S)
    assert given.another(10.0 + PROVEN_S) == Refusals(number=1, since=10.0 + PROVEN_S)
    assert Refusals(number=10_000).pause_s == 30.0


# --- sources ---------------------------------------------------------------------------------------------------------


def test_a_service_account_is_read_as_it_is_now(tmp_path: Path) -> None:
    token = tmp_path / "token"
    assert service_account(tmp_path, INSIDE) is None
    token.write_text("one\n")
    (tmp_path / "ca.crt").touch()
    assert service_account(tmp_path, {}) is None
    found = service_account(tmp_path, INSIDE)
    expected = kopf.ConnectionInfo(server="https://10.0.0.1:443", token="one", ca_path=str(tmp_path / "ca.crt"))
    assert found == expected
    token.write_text("two")
    assert (found := service_account(tmp_path, {**INSIDE, "KUBERNETES_SERVICE_HOST": "fd00::1"})) is not None
    assert (found.server, found.token) == ("https://[fd00::1]:443", "two")
    token.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        service_account(tmp_path, INSIDE)


def test_outside_of_a_pod_it_is_the_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(
        """
        current-context: a
        contexts: [{name: a, context: {cluster: b, user: c}}]
        clusters: [{name: b, cluster: {server: "http://x"}}]
        users: [{name: c, user: {token: t}}]
        """
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    found = source(str(path))(settings=kopf.OperatorSettings())
    assert (found.server, found.token) == ("http://x", "t")
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match="neither"):
        source(str(path))(settings=kopf.OperatorSettings())


# --- what an administrator sees --------------------------------------------------------------------------------------


async def test_an_operator_that_is_refused_is_not_ready_and_says_why(lab: Lab) -> None:
    """kopf and the passes have clients of their own; each may be the one that is refused."""
    kube = Kube(None)  # type: ignore[arg-type]
    operator = Operator(kube, Options(agent_namespace="system"))
    check = operator.health.ready["credentials"]
    assert check() is None
    kube.refused_since = 0.0
    assert "401" in str(check())
    kube.refused_since = None
    operator._login = lab.login
    await lab.given()
    await lab.given()
    assert REFUSES in str(check())
    assert all(x() is None for x in operator.health.live.values()), "a restart has no better credentials"
