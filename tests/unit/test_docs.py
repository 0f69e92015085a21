"""The documentation is built strictly, and what it names is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllmsnapshot.api import catalog

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(p.relative_to(ROOT)) for p in (*DOCS.rglob("*.md"), ROOT / "README.md"))


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    # Not --quiet: warnings that are not shown do not count. The theme's makers warn of a version of mkdocs that is not in use.
    env = {"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/index.html").exists()


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for file, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text):
        tree = ast.parse((ROOT / file).read_text())
        if name:
            found = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in found, f"{file} has no {name}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_links_exist(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", (ROOT / page).read_text()):
        assert (here / target).exists(), f"{page}: {target}"


def test_the_page_of_operations_says_what_to_do_about_every_reason() -> None:
    text = (DOCS / "operations.md").read_text()
    headings = set(re.findall(r"^### (\w+)$", text, re.M))
    nothing = set(re.findall(r"`(\w+)`", text.split("### Nothing to do")[1].split("\n#")[0]))
    assert not headings & nothing
    assert headings | nothing == set(catalog.REASONS)


def test_the_page_of_known_failures_has_thirty() -> None:
    rows = re.findall(r"^\| (\d+) \|", (DOCS / "known-failures.md").read_text(), re.M)
    assert rows == [str(n) for n in range(1, 31)]
