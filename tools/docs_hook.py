"""Hook of mkdocs: what the pages say of files outside of docs/ is shown as the path it is.

The pages are read in a checkout and on the site. Links to the chart, the examples or a test work in the first; the site has no
such files, and no repository address is written down anywhere. A link that leads nowhere stays an error in both.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page. Raises FileNotFoundError for a link to a file that is not there."""
    docs = Path(config["docs_dir"])
    here = (docs / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        target = Path(posixpath.normpath(here / match[2]))
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {match[2]} is not there")
        path = target.relative_to(docs.parent)
        return f"`{path}`" if match[1].strip("`") in (str(path), path.name) else f"{match[1]} (`{path}`)"

    return _LINK.sub(shown, markdown)
