"""A grammar for a tool call that the request demands: V4.1's DSML after the block that the prompt has opened.

    <DSML invoke name="weather">
    <DSML parameter name="city" string="true">any text</DSML parameter>
    <DSML parameter name="days" string="false">JSON by the parameter's schema</DSML parameter>
    </DSML invoke>
    </DSML calls>

The marker is one special token, which text cannot contain, so a parameter's text may hold anything else. A strict tool
gets exactly its parameters, in the order of its schema; another tool any of its own.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from dsuf.text.grammar import Grammar


def tool_call_grammar(tools: str, dsml_id: int, several: bool = True) -> Grammar:
    """The grammar over `tools`, a JSON array of Chat Completions function tools; `dsml_id` is the marker's token.

    One call, or with `several` one or more.
    """
    rules = [
        f"marker: <[{dsml_id}]>",
        f'start: call{"+" * several} "</" marker " calls>"',
        'close: marker " parameter>\\n"',
        # the text takes the "</" that follows it along: nothing else says where it ends
        'text: " string=\\"true\\">" /(?s:.*)<\\// close',
    ]
    calls = []
    for i, tool in enumerate(msgspec.json.decode(tools)):
        function = tool["function"]
        calls.append(f"call_{i}")
        rules += _call(i, function["name"], function.get("parameters") or {}, bool(function.get("strict")))
    rules.append(f"call: {' | '.join(calls)}")
    return Grammar("lark", "\n".join(rules) + "\n")


def _call(i: int, name: str, schema: dict[str, Any], strict: bool) -> list[str]:
    """The rules of one tool."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parameters, rules = [], []
    for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
        parameters.append(f"parameter_{i}_{j}")
        rules += [
            f'parameter_{i}_{j}: "<" marker {_quoted(f" parameter name={chr(34)}{key}{chr(34)}")} value_{i}_{j}',
            f"value_{i}_{j}: {_value(value, shared)}",
        ]
    inside = " ".join(parameters) if strict else f"({' | '.join(parameters)})*" if parameters else ""
    opening = _quoted(f' invoke name="{name}">\n')
    return [f'call_{i}: "<" marker {opening} {inside} "</" marker " invoke>\\n"', *rules]


def _value(schema: Any, shared: dict[str, Any]) -> str:
    """Text for a string, JSON for another type, either one where the schema does not say."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" and "enum" in schema:
        words = " | ".join(_quoted(f"{word}</") for word in schema["enum"])
        return f'" string=\\"true\\">" ({words}) close'
    whole = json.dumps({**schema, **shared} if isinstance(schema, dict) else schema)
    as_json = f'" string=\\"false\\">" %json {whole} "</" close'
    if kind == "string":
        return "text"
    return as_json if isinstance(kind, str) else f"text | {as_json}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
