"""Kubernetes' checks of custom resources, by the schemas of their definitions, and stricter: what a server would prune
silently, a field that the schema has not, is an error here.

The schemas are files KIND_VERSION.json of a folder, each {"group", "kind", "version", "schema"}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.validators

_RANGES = {"int32": 2**31, "int64": 2**63}
_NAME = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 253, "pattern": rf"^{_NAME}(\.{_NAME})*$"},
        "namespace": {"type": "string", "maxLength": 63, "pattern": f"^{_NAME}$"},
        "labels": _TEXTS,
        "annotations": _TEXTS,
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": {"type": "array", "items": {"type": "object"}},
        **{name: {"type": "string"} for name in ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")},
        **{name: {"type": "integer"} for name in ("generation", "deletionGracePeriodSeconds")},
    },
}


class Refused(ValueError):
    """An object is not one of its kind; the message has each field that is wrong, as the API server writes it."""


def load_schemas(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(`GROUP/VERSION`, kind) -> its strict schema, of all files of the folder."""
    schemas = {}
    for path in sorted(folder.glob("*.json")):
        read = json.loads(path.read_text(encoding="utf-8"))
        made = strict(read["schema"])
        made["properties"]["metadata"] = _METADATA
        made["required"] = sorted({"apiVersion", "kind", "metadata", *made.get("required", ())})
        schemas[f"{read['group']}/{read['version']}", read["kind"]] = made
    return schemas


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A structural schema as a JSON schema that allows no other fields than it names."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            made[key] = {name: strict(one) for name, one in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            made[key] = strict(value)
        elif key in ("anyOf", "allOf", "oneOf"):
            made[key] = [strict(one) for one in value]
        elif not key.startswith("x-kubernetes") and key not in ("description", "default", "nullable"):
            made[key] = value
    preserves = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "additionalProperties" not in made and not preserves:
        made["additionalProperties"] = False
    if schema.get("format") in _RANGES and schema.get("type") == "integer":
        limit = _RANGES[schema["format"]]
        made["minimum"] = max(made.get("minimum", -limit), -limit)
        made["maximum"] = min(made.get("maximum", limit - 1), limit - 1)
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if schema.get("nullable"):
        made["type"] = [made["type"], "null"]
    if keys := schema.get("x-kubernetes-list-map-keys"):
        made["uniqueBy"] = [keys, {key: one.get("default") for key, one in _fields(schema).items()}]
    elif schema.get("x-kubernetes-list-type") == "set":
        made["uniqueItems"] = True
    return made


def _fields(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return schema.get("items", {}).get("properties", {})


def _unique_by(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
    del validator, schema
    keys, defaults = value
    if isinstance(instance, list):
        seen = [tuple(one.get(key, defaults.get(key)) for key in keys) for one in instance if isinstance(one, dict)]
        if len(set(seen)) < len(seen):
            yield jsonschema.ValidationError(f"Duplicate value: two entries have the same {', '.join(keys)}")


_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"uniqueBy": _unique_by})
_formats = jsonschema.FormatChecker(formats=())


@_formats.checks("date-time", raises=ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or (value[10:11] == "T" and datetime.fromisoformat(value).tzinfo is not None)


def check(schema: Mapping[str, Any], read: Any) -> None:
    """Raises Refused for an object that its schema does not allow, or whose labels are none."""
    problems = [
        f"{'.'.join(map(str, error.absolute_path)) or 'the object'}: {error.message[:300]}"
        for error in _Validator(schema, format_checker=_formats).iter_errors(read)
    ]
    for place, labels in _label_maps(read):
        for name, value in labels.items():
            if not _LABEL.fullmatch(str(name)) or not _LABEL_VALUE.fullmatch(str(value)):
                problems.append(f"{place}: {name}={value} is no label")
    if problems:
        raise Refused("; ".join(problems))


def _label_maps(read: Any, place: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Where labels are, and they."""
    found = []
    if isinstance(read, Mapping):
        for key, value in read.items():
            if key in ("labels", "matchLabels") and isinstance(value, Mapping):
                found.append((f"{place}.{key}".lstrip("."), value))
            else:
                found += _label_maps(value, f"{place}.{key}")
    elif isinstance(read, list):
        for number, value in enumerate(read):
            found += _label_maps(value, f"{place}[{number}]")
    return found
