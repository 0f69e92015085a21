"""Generated files are what the code generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tools import chart_readme, generate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(generate.GENERATED))
def test_generated_file_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == generate.GENERATED[path](), "run `make generate`"


def test_the_charts_readme_has_every_value() -> None:
    source = (chart_readme.CHART / "values.yaml").read_text()
    described = [path for path, _ in chart_readme.values(source)]
    assert len(described) == len(set(described))

    def leaves(tree: object, path: str) -> list[str]:
        """Paths of values that have no description and none above them."""
        if path in described:
            return []
        if isinstance(tree, dict) and tree:
            return [leaf for name, value in tree.items() for leaf in leaves(value, f"{path}.{name}".lstrip("."))]
        return [path]

    assert leaves(yaml.safe_load(source), "") == []


def test_a_description_may_have_several_lines() -> None:
    text = """\
# A heading that describes nothing.
a:
  # -- First
  # and second.
  b: 1
  c:
    d: {}
  # A remark.
  e: 2
"""
    assert list(chart_readme.values(text)) == [("a.b", "First and second.")]
