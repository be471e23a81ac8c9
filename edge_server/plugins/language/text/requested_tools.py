"""Tools that a chat request offers to the model: parser, limits, and the JSON schemas of their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.token_engine import schema_place

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


MAX_CALLS = 16
"""Of one answer under "required"."""

_MAX_TOOLS = 128


_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are no schemas."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of a request, in OpenAI's form.

    `choice`: "auto" lets the model choose between text and calls, "required" makes it call, any other value is the name
    of the function that it must call. `allows_several` lets it call several times under "required".
    """

    items: Sequence[Mapping[str, Any]]
    choice: str
    allows_several: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.by_name)

    @property
    def by_name(self) -> Mapping[str, Mapping[str, Any]]:
        return {item["function"]["name"]: item["function"] for item in self.items}

    def json_schema(self) -> str:
        """Return the schema that makes the model call as `choice` says; "" for "auto"."""
        if self.choice == "auto":
            return ""
        functions = [item["function"] for item in self.items]
        if self.choice != "required":
            function = next(item for item in functions if item["name"] == self.choice)
            return json.dumps(parameters_schema(function))
        path = "#/items" if self.allows_several else "#"
        calls = []
        for index, item in enumerate(functions):
            root = path if len(functions) == 1 else f"{path}/anyOf/{index}"
            arguments = _move_references(parameters_schema(item), f"{root}/properties/arguments")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": item["name"]}, "arguments": arguments},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if self.allows_several:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_CALLS}
        return json.dumps(schema)

    @property
    def strict_names(self) -> frozenset[str]:
        """Functions whose calls must fit their schemas under "auto"."""
        names = {item["function"]["name"] for item in self.items if item["function"].get("strict") is True}
        return frozenset(names if self.choice == "auto" else ())

    def strict(self) -> Tools:
        """Return these tools for a check of calls of `strict_names`: each call alone, as under "required"."""
        items = [
            item if name in self.strict_names else {"function": {"name": name, "parameters": {"type": "object"}}}
            for name, item in ((item["function"]["name"], item) for item in self.items)
        ]
        return Tools(items, "required")

    def place(self, path: Sequence[str | int]) -> str:
        """Return the name of a part of `json_schema`, in the tools as the client sent them."""
        index = next((index for index, item in enumerate(self.items) if item["function"]["name"] == self.choice), 0)
        if self.choice == "required":
            if self.allows_several:
                path = path[1:]  # items
            if path[:1] == ("anyOf",):
                if len(path) == 1:
                    return "tools"
                index, path = int(path[1]), path[2:]
            path = path[2:]  # properties.arguments
        return schema_place(f"tools[{index}].function.parameters", path)


def _move_references(schema: Any, root: str) -> Any:
    """Return a schema that becomes a part of another, at `root`, with its references to itself."""
    if isinstance(schema, list):
        return [_move_references(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"{root}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in _VALUES
        else _move_references(value, root)
        for key, value in schema.items()
    }


def parameters_schema(function: Mapping[str, Any]) -> Any:
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def read_tools(tools: object, choice: object, title: str, *, allows_several: bool = False) -> Tools | None:
    """Return the checked tools; None if there are none or the choice is "none". Raises InvalidRequest."""
    if not isinstance(tools, list | None) or len(tools or ()) > _MAX_TOOLS:
        raise InvalidRequest(f"{title}: tools: expected a list of at most {_MAX_TOOLS}")
    for place, item in enumerate(tools or ()):
        function = item.get("function") if isinstance(item, dict) and item.get("type") == "function" else None
        if not isinstance(function, dict):
            raise InvalidRequest(f"{title}: tools[{place}]: expected an object of type function")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{title}: tools[{place}].function.name: expected 1 to 64 letters, digits, '_', '.' or '-', got "
                f"{str(name)[:80]!r}"
            )
        if not isinstance(function.get("parameters"), dict | None):
            raise InvalidRequest(f"{title}: tools[{place}].function.parameters: expected a JSON schema")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise InvalidRequest(
            f"{title}: tool_choice: 'allowed_tools' is not supported; send only these tools in 'tools'"
        )
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else None
        names = [item["function"]["name"] for item in tools or ()]
        if choice not in names:
            raise InvalidRequest(
                f"{title}: tool_choice: expected one of {', '.join(names) or 'the tools'}, got {str(choice)[:80]!r}"
            )
    elif choice not in (None, "none", "auto", "required"):
        raise InvalidRequest(
            f"{title}: tool_choice: expected none, auto, required or a function, got {str(choice)[:80]!r}"
        )
    if not tools or choice == "none":
        if choice == "required":
            raise InvalidRequest(f"{title}: tool_choice: 'required' without tools")
        return None
    return Tools(tools, choice or "auto", allows_several)
