"""docs/reference/api.md: the fields of the custom resources, from the schemas that the CRDs carry, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.reference import NOTE, table
from vllmsnapshot.api import constants as c
from vllmsnapshot.api.crd import schema_of
from vllmsnapshot.api.types import Model, VLLMSnapshot, VLLMSnapshotContent, VLLMSnapshotNode

Schema = dict[str, Any]
KINDS: tuple[type[Model], ...] = (VLLMSnapshot, VLLMSnapshotContent, VLLMSnapshotNode)


def text() -> str:
    """The page."""
    page = f"""# API

{NOTE}
`{c.API_VERSION}`. A field in **bold** is required. What a rule refuses is refused when the object is applied, with the message that stands here.
"""
    for kind in KINDS:
        schema = schema_of(kind, root=True)
        page += f"\n## {kind.KIND}\n\n{_sentence(schema)}\n"  # type: ignore[attr-defined]
        for part in ("spec", "status"):
            if part in schema["properties"]:
                page += f"\n### {kind.KIND} {part}\n\n{_sentence(schema['properties'][part])}\n\n"  # type: ignore[attr-defined]
                page += table(["field", "type", "default", "meaning"], list(_rows(schema["properties"][part], part)))
                rules = list(_rules(schema["properties"][part], part))
                if rules:
                    page += "\nRefused:\n\n" + "".join(f"- `{where}`: {message}\n" for where, message in rules)
    return page


def _sentence(schema: Schema) -> str:
    return " ".join(str(schema.get("description", "")).split())


def _rows(schema: Schema, path: str) -> Iterator[list[str]]:
    for name, field in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        shown = f"**`{where}`**" if name in schema.get("required", []) else f"`{where}`"
        default = field.get("default")
        yield [shown, _type(field), "" if default is None or isinstance(default, dict) else f"`{default}`", _sentence(field)]
        if "x-kubernetes-preserve-unknown-fields" in field:
            continue  # described only as far as rules look at it
        yield from _rows(field, where)
        yield from _rows(field.get("items", {}), f"{where}[]")


def _type(field: Schema) -> str:
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if kind == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map to {_type(field['additionalProperties'])}"
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f"{kind}, {low} to {high}"
    return kind if low is None else f"{kind}, at least {low}"


def _rules(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get("x-kubernetes-validations", []):
        yield f"{path}{rule.get('fieldPath', '')}", rule["message"]
    for name, field in schema.get("properties", {}).items():
        yield from _rules(field, f"{path}.{name}")
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")
