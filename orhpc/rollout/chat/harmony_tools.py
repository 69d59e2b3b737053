"""Tools as TypeScript, as gpt-oss reads them (https://cookbook.openai.com/articles/openai-harmony)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_SIMPLE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def namespace(tools: Sequence[Mapping[str, Any]]) -> str:
    """Write tools in OpenAI's form as the namespace ``functions``."""
    out = ["## functions\n\nnamespace functions {\n\n"]
    for tool in (t["function"] for t in tools):
        schema = tool.get("parameters") or {}
        properties = schema.get("properties") or {}
        out.append(f"// {tool.get('description') or ''}\ntype {tool['name']} = ")
        if properties:
            required = schema.get("required") or []
            lines = (_parameter(name, spec, name in required) for name, spec in properties.items())
            out.append("(_: {\n" + "".join(lines) + "}) => any;\n\n")
        else:
            out.append("() => any;\n\n")
    return "".join(out) + "} // namespace functions"


def _parameter(name: str, spec: Any, required: bool) -> str:
    spec = spec if isinstance(spec, Mapping) else {}
    comment = f"// {spec['description']}\n" if spec.get("description") else ""
    default = ""
    if "default" in spec:
        value = spec["default"] if spec.get("enum") else json.dumps(spec["default"], ensure_ascii=False)
        default = f", // default: {value}"
    return f"{comment}{name}{'' if required else '?'}: {_type(spec)}{default},\n"


def _type(spec: Any) -> str:
    """Return the TypeScript type of a JSON schema; ``any`` for what has none."""
    spec = spec if isinstance(spec, Mapping) else {}
    kind = spec.get("type")
    null = " | null" if spec.get("nullable") else ""
    if isinstance(kind, list):
        return " | ".join(map(str, kind)) or "any"
    if kind == "array":
        inner = _type(spec["items"]) if spec.get("items") else "any"
        return f"{'any' if len(inner) > 50 else inner}[]{null}"
    if kind == "string" and spec.get("enum"):
        return '"' + '" | "'.join(map(str, spec["enum"])) + '"'
    if kind in _SIMPLE:
        return _SIMPLE[kind] + (null if kind == "string" else "")
    if kind == "object":
        properties = spec.get("properties") or {}
        required = spec.get("required") or []
        inner = ", ".join(f"{n}{'' if n in required else '?'}: {_type(s)}" for n, s in properties.items())
        return f"{{\n{inner}}}" if properties else "object"
    return "any"
