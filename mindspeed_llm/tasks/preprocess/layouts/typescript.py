"""Tools as TypeScript declarations, the way the chat template of gpt-oss writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_llm.tasks.preprocess.tool_formats import to_json

_PLAIN = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def namespace(name: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """A namespace with one function type per tool."""
    declarations = "".join(
        f"// {tool.get('description', '')}\n"
        f"type {tool['name']} = {_signature(tool.get('parameters') or {})} => any;\n\n"
        for tool in tools
    )
    return f"## {name}\n\nnamespace {name} {{\n\n{declarations}}} // namespace {name}"


def _signature(parameters: Mapping[str, Any]) -> str:
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or []
    if not properties:
        return "()"
    fields = "".join(_field(name, spec, name in required) for name, spec in properties.items())
    return f"(_: {{\n{fields}}})"


def _field(name: str, spec: Mapping[str, Any], is_required: bool) -> str:
    comment = f"// {spec['description']}\n" if spec.get("description") else ""
    return f"{comment}{name}{'' if is_required else '?'}: {_type(spec)}{_default(spec)},\n"


def _default(spec: Mapping[str, Any]) -> str:
    if "default" not in spec:
        return ""
    value = spec["default"] if spec.get("enum") or spec.get("oneOf") else to_json(spec["default"])
    return f"{'' if spec.get('oneOf') and not spec.get('enum') else ', '}// default: {value}"


def _type(spec: Mapping[str, Any]) -> str:
    """The type of a value; the odd white space in nested objects and unions is the template's."""
    kind, nullable = spec.get("type"), " | null" if spec.get("nullable") else ""
    if kind == "array":
        return _element(spec.get("items") or {}) + nullable
    if isinstance(kind, list) and kind:
        return " | ".join(map(str, kind))
    if spec.get("oneOf"):
        return _union(spec["oneOf"])
    if kind == "string" and spec.get("enum"):
        return '"' + '" | "'.join(map(str, spec["enum"])) + '"'
    if kind == "object":
        return _object(spec)
    if kind in _PLAIN:
        return _PLAIN[kind] + (nullable if kind == "string" else "")
    return "any"


def _element(items: Mapping[str, Any]) -> str:
    if not items:
        return "any[]"
    if items.get("type") in _PLAIN and isinstance(items["type"], str):
        return f"{_PLAIN[items['type']]}[]"
    inner = _type(items)
    return "any[]" if inner == "object | object" or len(inner) > 50 else f"{inner}[]"


def _union(variants: Sequence[Mapping[str, Any]]) -> str:
    if len(variants) > 1 and any(variant.get("type") == "object" for variant in variants):
        return "any"
    parts = []
    for variant in variants:
        comment = f"// {variant['description']}" if variant.get("description") else ""
        default = f"{' ' * 20}// default: {to_json(variant['default'])}" if "default" in variant else ""
        parts.append(_type(variant) + comment + default)
    return " | \n".join(parts)


def _object(spec: Mapping[str, Any]) -> str:
    properties, required = spec.get("properties") or {}, spec.get("required") or []
    if not properties:
        return "object"
    fields = (
        f"{name}{'' if name in required else '?'}: \n{' ' * 16}{_type(value)}" for name, value in properties.items()
    )
    return f"{{\n{', '.join(fields)}}}"
