"""Flags and environment of the operator process."""

from __future__ import annotations

import pytest

from vllmsnapshot.controller.app import Options, parse


def test_defaults() -> None:
    assert parse([], {}) == Options(agent_namespace="vllmsnapshot-system")


def test_environment_and_flags_which_win() -> None:
    env = {
        "POD_NAMESPACE": "ns",
        "WATCH_NAMESPACES": "a,b",
        "HEALTH_PORT": "1",
        "RESYNC_SECONDS": "5",
        "LOG_FORMAT": "json",
        "LOG_LEVEL": "DEBUG",
    }
    told = parse([], env)
    assert (told.agent_namespace, told.namespaces, told.health_port, told.resync_s, told.log_json, told.log_level) == (
        "ns",
        ("a", "b"),
        1,
        5.0,
        True,
        "DEBUG",
    )
    assert parse(["--agent-namespace", "other", "--health-port", "2", "--log-format", "text"], env) == Options(
        agent_namespace="other", namespaces=("a", "b"), health_port=2, resync_s=5.0, log_level="DEBUG"
    )


@pytest.mark.parametrize("argv", [["--resync", "0"], ["--workers", "0"], ["--log-level", "LOUD"], ["--nonsense"]])
def test_nonsense_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv, {})
