"""A replica on the node's network whose port somebody else has: never Ready by the other one's answers, and Ready when the port is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.node.snapshot import Make, answer
from tests.system import System, condition
from vllmsnapshot.api import constants as c
from vllmsnapshot.kube import Object
from vllmsnapshot_child.protocol import EXIT_CODES, Reason

PORT = 21020


class Stranger(BaseHTTPRequestHandler):
    """Finds itself healthy, whoever asks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def stranger(system: System) -> Iterator[ThreadingHTTPServer]:
    """Another engine on the node's addresses. (`system` has entered the node's network.)"""
    del system
    with ThreadingHTTPServer(("0.0.0.0", PORT), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_a_port_that_somebody_else_has(make: Make, system: System, stranger: ThreadingHTTPServer) -> None:
    snap = await make(
        "taken", serving={"hostNetwork": "Enabled", "portRange": {"start": PORT, "end": PORT}}, restore={"failureBudget": 1}
    )
    content = await snap.captured()
    first = await snap.first_pod()
    name, uid = first["metadata"]["name"], first["metadata"]["uid"]

    async def ended() -> Object | None:
        pod = await snap.pod(name)
        assert condition(pod, "Ready") != "True", "somebody else's health was taken for the replica's"
        for status in pod["status"].get("containerStatuses", []):
            over = status["state"].get("terminated") or status["lastState"].get("terminated")
            if status["name"] == c.CONTAINER and over:
                return dict(over)
        return None

    over = await system.until("the container to end", ended, 120)
    assert over["exitCode"] == EXIT_CODES[Reason.BIND_FAILED]

    async def told() -> bool:
        return any(f"BindFailed: port {PORT}" in report.message for report in snap.seen.reports(uid))

    await system.until("the pod's report to say why", told, 120)
    stranger.shutdown()
    stranger.server_close()
    (pod,) = await snap.ready(1, timeout_s=180)
    assert pod["metadata"]["name"] == name
    assert await snap.ask(pod) == answer()
    assert c.QUARANTINED not in snap.seen.content_conditions(content), "the artifact had no part in it"
