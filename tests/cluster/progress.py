"""Progress on stderr: a live line on a terminal, plain lines with elapsed seconds everywhere else."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

from rich.console import Console

#: Silence is what makes people kill a build; in a log file one line per half minute is enough to prove life.
_HEARTBEAT_SECONDS: Final = 30.0


class Progress:
    """Announces steps and how long they took. One instance serves a whole command."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._quiet = quiet

    @property
    def elapsed(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._started

    def note(self, text: str) -> None:
        """Print one line with the time since the command began."""
        if not self._quiet:
            self._console.print(f"[dim]{self.elapsed:7.1f}s[/dim] {text}", markup=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show that *title* is running, then how long it took (or that it failed)."""
        if self._quiet:
            yield
            return
        started = time.monotonic()
        live: contextlib.AbstractContextManager[object]
        live = self._console.status(title) if self._console.is_terminal else self._heartbeat(title, started)
        try:
            with live:
                yield
        except BaseException:
            self.note(f"{title}: failed after {time.monotonic() - started:.1f} s")
            raise
        self.note(f"{title}: {time.monotonic() - started:.1f} s")

    @contextlib.contextmanager
    def _heartbeat(self, title: str, started: float) -> Iterator[None]:
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_HEARTBEAT_SECONDS):
                self.note(f"{title}: still running ({time.monotonic() - started:.0f} s)")

        thread = threading.Thread(target=beat, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            sys.stderr.flush()
