"""CRDs from the models of `types.py`: `python -m vllmsnapshot.api.crd deploy/crds`.

A CRD needs a structural schema, which pydantic's JSON schema is not: no $ref, no `anyOf [T, null]`, no const, no
additionalProperties: false beside properties. The conversion here handles exactly what the models use and refuses the rest
(TypeError at generation), so that a new construct in a model cannot silently become a hole in validation.
"""

from __future__ import annotations

import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import StringConstraints
from pydantic.fields import FieldInfo

from . import constants as c
from .types import (
    CEL,
    IntOrString,
    ListMap,
    Model,
    PreserveUnknown,
    VLLMSnapshot,
    VLLMSnapshotContent,
    VLLMSnapshotNode,
)

Schema = dict[str, Any]


def schema_of(model: type[Model], *, root: bool = False) -> Schema:
    """The structural schema of a model."""
    hints = typing.get_type_hints(model, include_extras=True)
    properties: Schema = {}
    required: list[str] = []
    for name, info in model.model_fields.items():
        alias = info.alias or name
        if root and name == "metadata":
            continue
        properties[alias] = _field(hints[name], info, f"{model.__name__}.{name}")
        if info.is_required():
            required.append(alias)
        elif info.default is not None:
            properties[alias]["default"] = _default(info.default)
    out: Schema = {"type": "object", "description": (model.__doc__ or "").strip(), "properties": properties}
    if required:
        out["required"] = required
    rules: list[CEL] = getattr(model, "RULES", [])
    if rules:
        out["x-kubernetes-validations"] = [_rule(r) for r in rules]
    return out


def _default(value: Any) -> Any:
    if isinstance(value, Model):
        # In full: the API server checks the rules on the default before it fills the nested ones in.
        return value.dump()
    return value.value if isinstance(value, Enum) else value


def _rule(rule: CEL) -> Schema:
    out: Schema = {"rule": rule.rule, "message": rule.message, "reason": rule.reason}
    if rule.field_path is not None:
        out["fieldPath"] = rule.field_path
    return out


def _field(hint: Any, info: FieldInfo, where: str) -> Schema:
    out = _type(hint, where)
    if info.description:
        out["description"] = info.description
    return out


def _type(hint: Any, where: str) -> Schema:
    """The schema of a type annotation, with the constraints of its Annotated metadata."""
    if typing.get_origin(hint) is Annotated:
        base, *metadata = typing.get_args(hint)
        if any(m is IntOrString for m in metadata):
            return {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}], "maxLength": 64}
        if open_object := next((m for m in metadata if isinstance(m, PreserveUnknown)), None):
            return _open_object(open_object)
        out = _type(base, where)
        for m in metadata:
            _constrain(out, m, where)
        return out
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in args if a is not type(None)]
        if len(rest) != 1:
            raise TypeError(f"{where}: a union has no structural schema")
        return _type(rest[0], where)
    if origin is Literal:
        return {"type": "string", "enum": list(args)}
    if origin is list:
        return {"type": "array", "items": _type(args[0], where)}
    if origin is dict:
        if args[1] is Any:
            raise TypeError(f"{where}: an open object must be marked PreserveUnknown")
        return {"type": "object", "additionalProperties": _type(args[1], where)}
    if isinstance(hint, type):
        if issubclass(hint, Model):
            return schema_of(hint)
        if issubclass(hint, Enum):
            return {"type": "string", "enum": [e.value for e in hint]}
        if hint is str:
            return {"type": "string"}
        if hint is int:
            return {"type": "integer", "format": "int64"}
    raise TypeError(f"{where}: {hint!r} has no structural schema")


def _open_object(mark: PreserveUnknown) -> Schema:
    out: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    for name, kind in mark.properties:
        described: Schema = {"type": kind}
        if kind == "array":
            described["items"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        out.setdefault("properties", {})[name] = described
    return out


def _constrain(out: Schema, mark: Any, where: str) -> None:
    """Apply one piece of Annotated metadata to the schema."""
    kind = out.get("type")
    if isinstance(mark, FieldInfo):
        for m in mark.metadata:
            _constrain(out, m, where)
        if isinstance(mark.json_schema_extra, dict):
            out.update(mark.json_schema_extra)
    elif isinstance(mark, StringConstraints):
        for key, value in (("minLength", mark.min_length), ("maxLength", mark.max_length), ("pattern", mark.pattern)):
            if value is not None:
                out[key] = value
    elif isinstance(mark, Ge):
        out["minimum"] = mark.ge
    elif isinstance(mark, Le):
        out["maximum"] = mark.le
    elif isinstance(mark, (MinLen, MaxLen)):
        suffix = {"array": "Items", "object": "Properties", "string": "Length"}[str(kind)]
        if isinstance(mark, MinLen):
            out["min" + suffix] = mark.min_length
        else:
            out["max" + suffix] = mark.max_length
    elif isinstance(mark, ListMap):
        out["x-kubernetes-list-type"] = "map"
        out["x-kubernetes-list-map-keys"] = [mark.key]
    elif isinstance(mark, tuple) and all(isinstance(m, CEL) for m in mark):
        out["x-kubernetes-validations"] = [_rule(m) for m in mark]
    elif isinstance(mark, (Gt, Lt)):
        raise TypeError(f"{where}: exclusive bounds are not used here; write ge/le")
    else:
        raise TypeError(f"{where}: {mark!r} is not understood")


def _condition(kind: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


def _column(name: str, path: str, kind: str = "string", description: str = "", priority: int = 0) -> Schema:
    out: Schema = {"name": name, "jsonPath": path, "type": kind}
    if description:
        out["description"] = description
    if priority:
        out["priority"] = priority
    return out


COLUMNS: dict[str, list[Schema]] = {
    "VLLMSnapshot": [
        _column("Ready", _condition(c.READY)),
        _column("Replicas", ".status.ready", description="ready / wanted"),
        _column("Restored", ".status.restoredReplicas", "integer", "replicas that came up from the snapshot"),
        _column("Snapshot", _condition(c.SNAPSHOT_READY, "reason"), description="state of the artifact"),
        _column("Cold", ".status.timings.coldStart", description="pod creation to serving, last cold start"),
        _column("Restore", ".status.timings.restoredStart", description="pod creation to serving, last restored start"),
        _column("Age", ".metadata.creationTimestamp", "date"),
        _column("Reason", _condition(c.READY, "reason"), priority=1),
        _column("Node", ".status.snapshot.node", priority=1),
        _column("Bytes", ".status.snapshot.bytes", "integer", priority=1),
        _column("Image", ".spec.image", priority=1),
        _column("Message", _condition(c.READY, "message"), priority=1),
    ],
    "VLLMSnapshotContent": [
        _column("Captured", _condition(c.CAPTURED)),
        _column("Quarantined", _condition(c.QUARANTINED)),
        _column("Snapshot", ".spec.snapshotRef.name"),
        _column("Namespace", ".spec.snapshotRef.namespace"),
        _column("Node", ".spec.nodeName"),
        _column("Bytes", ".status.artifact.bytes", "integer"),
        _column("Restores", ".status.restores.succeeded", "integer"),
        _column("Age", ".metadata.creationTimestamp", "date"),
        _column("Reason", _condition(c.FAILED, "reason"), priority=1),
        _column("Verified", ".status.verification.outcome", description="last verification that was asked for", priority=1),
        _column("Identity", ".spec.identity", priority=1),
    ],
    "VLLMSnapshotNode": [
        _column("Ready", _condition(c.READY)),
        _column("Reason", _condition(c.READY, "reason")),
        _column("Used", ".status.storeBytesUsed", "integer"),
        _column("Quota", ".status.storeBytesQuota", "integer", priority=1),
        _column("Free", ".status.storeBytesFree", "integer"),
        _column("Restoring", ".status.restoresInFlight", "integer"),
        _column("Age", ".metadata.creationTimestamp", "date"),
        _column("Message", _condition(c.READY, "message"), priority=1),
    ],
}


def crd(model: type[Any], short: str, *, namespaced: bool, scale: bool = False) -> Schema:
    """The CustomResourceDefinition of a root model."""
    schema = schema_of(model, root=True)
    schema["properties"] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        **schema["properties"],
    }
    # A field named `metadata` is required by the model, not by the schema: the API server adds it.
    schema["required"] = [r for r in schema.get("required", []) if r != "metadata"]
    if not schema["required"]:
        del schema["required"]
    if namespaced:
        # Pod, Service and content names are built from it and must stay valid.
        schema["x-kubernetes-validations"] = [
            {
                "rule": "self.metadata.name.size() <= 52 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "message": "metadata.name must be a DNS label of at most 52 characters: pods and the Service are named after it",
                "reason": "FieldValueInvalid",
            }
        ]
    subresources: Schema = {"status": {}}
    if scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{model.PLURAL}.{c.GROUP}"},
        "spec": {
            "group": c.GROUP,
            "scope": "Namespaced" if namespaced else "Cluster",
            "names": {
                "kind": model.KIND,
                "listKind": model.KIND + "List",
                "plural": model.PLURAL,
                "singular": model.KIND.lower(),
                "shortNames": [short],
                "categories": ["vllm"],
            },
            "versions": [
                {
                    "name": c.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": subresources,
                    "additionalPrinterColumns": COLUMNS[model.KIND],
                }
            ],
        },
    }


def all_crds() -> dict[str, Schema]:
    """File name to CRD."""
    return {
        "vllmsnapshots.yaml": crd(VLLMSnapshot, "vsnap", namespaced=True, scale=True),
        "vllmsnapshotcontents.yaml": crd(VLLMSnapshotContent, "vsnapcontent", namespaced=False),
        "vllmsnapshotnodes.yaml": crd(VLLMSnapshotNode, "vsnapnode", namespaced=False),
    }


def render(obj: Schema) -> str:
    """As YAML, in the order of the models."""
    head = "# Generated by `make generate` from operator/vllmsnapshot/api/types.py. Do not edit.\n"
    return head + yaml.safe_dump(obj, sort_keys=False, width=120, allow_unicode=True)


def main() -> None:
    """Write the CRDs into the directory given."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name, obj in all_crds().items():
        (target / name).write_text(render(obj))


if __name__ == "__main__":
    main()
