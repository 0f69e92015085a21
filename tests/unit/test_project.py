"""The repository's own rules: generated files are current, `operator/` does not shadow the standard library, sources are clean."""

from __future__ import annotations

import operator
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from vllmsnapshot.api.crd import all_crds, render, schema_of
from vllmsnapshot.api.types import CEL, Model, VLLMSnapshotSpec

ROOT = Path(__file__).resolve().parents[2]


def test_the_standard_librarys_operator_module_is_not_shadowed() -> None:
    assert operator.add(1, 2) == 3
    assert operator.__file__ is not None
    assert ROOT not in Path(operator.__file__).parents


@pytest.mark.parametrize("forbidden", ["operator/__init__.py", "operator/conftest.py"])
def test_operator_directory_holds_nothing_that_makes_it_a_module(forbidden: str) -> None:
    assert not (ROOT / forbidden).exists()


@pytest.mark.parametrize("name", sorted(all_crds()))
def test_checked_in_crd_is_what_the_models_generate(name: str) -> None:
    assert (ROOT / "deploy/crds" / name).read_text() == render(all_crds()[name]), "run `make generate`"


def _walk(schema: object, path: str = "") -> list[tuple[str, dict[str, object]]]:
    found = []
    if isinstance(schema, dict):
        if schema.get("x-kubernetes-int-or-string"):
            return [(path, {"type": "string", **schema})]
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return [(path, schema)]  # what is described below is there to be forbidden
        if "type" in schema or "anyOf" in schema:
            found.append((path, schema))
        for key, value in schema.items():
            found += _walk(value, f"{path}.{key}")
    elif isinstance(schema, list):
        for value in schema:
            found += _walk(value, path)
    return found


@pytest.mark.parametrize("name", sorted(all_crds()))
def test_every_string_and_list_of_the_schema_is_bounded(name: str) -> None:
    # The API server estimates the cost of CEL rules from the bounds; an unbounded field makes a CRD unacceptable one day.
    root = all_crds()[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        for path, schema in _walk(root.get(part, {}), part):
            if schema.get("type") == "string":
                assert "maxLength" in schema or "enum" in schema or "format" in schema, path
            if schema.get("type") == "array":
                assert "maxItems" in schema, path


def test_a_construct_without_a_structural_schema_is_refused_at_generation() -> None:
    class Bad(Model):
        field: int | str

    with pytest.raises(TypeError, match=r"Bad\.field"):
        schema_of(Bad)


def test_every_rule_has_a_message_that_is_a_sentence_for_users() -> None:
    rules: list[CEL] = list(VLLMSnapshotSpec.RULES)
    assert rules
    for rule in rules:
        assert len(rule.message) > 10, rule


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_no_machine_paths_in_tracked_files() -> None:
    # The pattern is put together so that this file does not match itself.
    pattern = re.compile("/" + "work/(main|shared)")
    for path in tracked():
        if path.suffix in (".lock", ".sum"):
            continue
        text = path.read_text(errors="replace")
        assert not pattern.search(text), path


def test_yaml_files_parse() -> None:
    for path in tracked():
        if path.suffix in (".yaml", ".yml") and "templates" not in path.parts:
            list(yaml.safe_load_all(path.read_text()))
