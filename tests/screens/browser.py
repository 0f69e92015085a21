"""A headless browser that makes a picture of a page, and the chart library that the page draws with."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests.cluster import host
from tests.cluster.errors import ClusterError
from tests.cluster.process import contained, run
from tests.cluster.progress import Progress

BROWSERS: Final = ("chromium-headless-shell", "chromium", "google-chrome")
"""By preference; the first one is installed if there is none."""
DRAWN_WITHIN_MS: Final = 20_000
"""Of the browser's own clock, which stands still while it works: a page of forty graphs is drawn in less."""


def chart_library(progress: Progress) -> Path:
    """plotly.js, out of the Python package that carries it."""
    directory = host.from_pypi("plotly", Path(__file__).with_name("plotly.lock"), "installing the chart library", progress)
    return directory / "plotly/package_data/plotly.min.js"


def screenshot(page: str, size: tuple[int, int], to: Path, progress: Progress) -> None:
    """The page, which needs no network, as a PNG of this size in pixels."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        host.ensure(BROWSERS[:1], progress)
        program = BROWSERS[0]
    with tempfile.TemporaryDirectory() as directory, progress.step(f"drawing {to.name}"):
        file, made = Path(directory) / "page.html", Path(directory) / "page.png"
        file.write_text(page)
        run(
            # The sandbox refuses to run as root. The page is ours, and the browser reaches nothing: it has no network.
            contained(
                [
                    *("unshare", "--net", program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                    *(f"--user-data-dir={directory}/profile", f"--window-size={size[0]},{size[1]}"),
                    *(f"--virtual-time-budget={DRAWN_WITHIN_MS}", f"--screenshot={made}", file.as_uri()),
                ]
            ),
            timeout=300,
        )
        if not made.exists():
            raise ClusterError(f"{program} made no picture")
        shutil.move(made, to)
