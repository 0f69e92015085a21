"""The side of a proof's process that talks: a line of JSON when it is up, and one for every file `ask` in the control directory.
Runs in a container."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

POLL_S = 0.005


def say(message: Mapping[str, Any]) -> None:
    """One line on stdout."""
    print(json.dumps(message), flush=True)


def attend(control: str, facts: Mapping[str, Any], step: Callable[[int], Mapping[str, Any]]) -> None:
    """Tell that all is set up, then answer for ever; `step` gets the number of the round."""
    say({"up": facts})
    number = 0
    ask = os.path.join(control, "ask")
    while True:
        if os.path.exists(ask):
            os.unlink(ask)
            number += 1
            say({"answer": {"round": number, "pid": os.getpid(), **step(number)}})
        else:
            time.sleep(POLL_S)
