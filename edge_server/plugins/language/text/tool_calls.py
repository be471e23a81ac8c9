"""Tools in chats: checks the tools of a request, and finds the calls in the text of an answer while it arrives."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.text.incremental_detokenizer import overlap

ToolFormat: TypeAlias = Literal["hermes", "llama3_json", "mistral", "pythonic"]
"""How a model writes its calls; the names are those of vLLM's `--tool-call-parser`.

- `hermes` (Hermes, Qwen): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with text around it. Newer models
  of Qwen write `<function=f><parameter=x>...</parameter></function>` between the tags.
- `llama3_json` (Llama 3): an answer that begins with `{"name": "f", "parameters": {...}}`; `;` between two calls.
- `mistral` (Mistral, also Granite 3 and Phi-4-mini): an answer that is a list, `[{"name": "f", "arguments": {...}}]`,
  after a tag that is a special token in most vocabularies, so that it is not in the text. Newer models of Mistral
  write `[TOOL_CALLS]f[ARGS]{...}` for each call, the oldest of these with an id of nine characters after the name.
- `pythonic` (LFM2, Llama 4): an answer that is a list in Python's syntax, `[f(x="a"), g()]`.
"""

ToolCallDelta: TypeAlias = dict[str, Any]
"""Part of a call in the form of OpenAI's streams: `index`, and `id`, `type` and `function.name` in the first part;
`function.arguments` is the next piece of the arguments, which are JSON text."""

_START, _END = "<tool_call>", "</tool_call>"
_LIST_TAGS = ("[TOOL_CALLS]", "<|tool_call|>", "<|tool_call_start|>", "functools")
"""Before a list of calls."""
_NAMED_CALL = re.compile(r"([A-Za-z0-9_.-]{1,73})(?:\[CALL_ID\][A-Za-z0-9]{9})?(?:\[ARGS\])?\s*(?=\{)")
_MAX_NAMED_HEAD = 100
"""Characters of a call before its arguments."""
_PYTHON_CALLS = re.compile(r"\[\s*[A-Za-z_][A-Za-z0-9_.-]{0,63}\(")
_MAX_PYTHON_CHARACTERS = 16_384
"""Of a list of calls in Python's syntax, which is parsed as a whole."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_TOOLS = 128
MAX_CALLS = 16
"""Of one answer under "required"."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, in the order in which models are trained to write it."""


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
        return frozenset(item["function"]["name"] for item in self.items)

    def json_schema(self) -> str:
        """Return the schema that makes the model call as `choice` says; "" for "auto"."""
        if self.choice == "auto":
            return ""
        functions = [item["function"] for item in self.items]
        if self.choice != "required":
            function = next(item for item in functions if item["name"] == self.choice)
            return json.dumps(_parameters(function))
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": item["name"]}, "arguments": _parameters(item)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for item in functions
        ]
        schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if self.allows_several:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_CALLS}
        return json.dumps(schema)

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


def schema_place(name: str, path: Sequence[str | int]) -> str:
    """Return the name of a part of a schema, such as `json_schema.properties.x.anyOf[1]`. `name` is the schema's."""
    return name + "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in path)


def _parameters(function: Mapping[str, Any]) -> Any:
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


def has_tools(chat_template: str) -> bool:
    """Return whether the chat template describes tools to the model."""
    return re.search(r"\btools\b", chat_template) is not None


def guess_format(chat_template: str) -> ToolFormat | None:
    """Return how a model with this chat template writes its calls; None if the template does not show it."""
    if _START in chat_template:
        return "hermes"
    if any(mark in chat_template for mark in ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ")):
        return "pythonic"
    if "<|tool_call|>" in chat_template or "[TOOL_CALLS]" in chat_template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in chat_template or '"parameters"' in chat_template else None


class ToolCallParser:
    """Splits the text of one answer into content and calls. Only calls of the given tools count.

    With `choice` "required" the whole text is a call or a list of calls, with the name of a function its arguments: the
    schema of `Tools` made it so.
    """

    def __init__(self, tools: Tools, form: ToolFormat | None) -> None:
        self.call_count = 0
        self._names = tools.names
        self._tools = tools
        self._is_list = tools.choice == "required" and tools.allows_several
        self._has_tags = tools.choice == "auto" and form == "hermes"
        self._list_form = form if tools.choice == "auto" and form in ("mistral", "pythonic") else None
        self._list_head = ""
        """What stands before the first call of a list. It is content if none follows."""
        self._buffer = ""
        self._space = ""
        """White space after the content, which is dropped if a call follows."""
        self._state: Literal["start", "content", "call", "arguments", "after"] = "start"
        self._scanner = _ObjectScanner()
        self._deltas: list[ToolCallDelta] = []
        if tools.choice not in ("auto", "required"):
            self._begin_call(tools.choice)

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Add text. Return the content and the parts of calls that are certain. `is_last`: nothing is held back."""
        self._buffer += text
        content = ""
        while True:
            before = (self._state, len(self._buffer))
            content += self._advance(is_last)
            if (self._state, len(self._buffer)) == before:
                break
        content = self._space + content
        kept = content if is_last and not self.call_count else content.rstrip()
        self._space = content[len(kept) :]
        deltas, self._deltas = self._deltas, []
        return kept, deltas

    def _advance(self, is_last: bool) -> str:
        """Work off some of the buffer, and return its content."""
        if self._state in ("start", "content"):
            return self._find_call(is_last)
        if self._state == "call":
            return self._read_head(is_last)
        if self._state == "arguments":
            end = self._scanner.find_end(self._buffer)
            piece, self._buffer = self._buffer[:end], self._buffer[end:]
            if piece:
                self._deltas.append({"index": self.call_count - 1, "function": {"arguments": piece}})
            if self._scanner.is_complete:
                self._state = "after"
            return ""
        # After the arguments: the rest of the call, then perhaps another one.
        if self._has_tags:
            place = self._buffer.find(_END)
            if place >= 0:
                self._buffer = self._buffer[place + len(_END) :]
                self._state = "content"
        else:
            self._buffer = self._buffer.lstrip("},] \t\r\n" if self._is_list else "}; \t\r\n")
            if self._buffer:
                self._state = "call" if self._buffer.startswith("{") else "content"
                if self._list_form == "mistral" and not self._is_list:
                    self._state = "start"
        return ""

    def _find_call(self, is_last: bool) -> str:
        if self._list_form and self._state == "start":
            return self._find_list(is_last)
        if self._has_tags:
            content, tag, rest = self._buffer.partition(_START)
            if tag:
                self._buffer, self._state, self._space = rest, "call", ""
                return content.rstrip()
            keep = 0 if is_last else overlap(self._buffer, _START)
        else:
            stripped = self._buffer.lstrip("[ \t\r\n" if self._is_list and not self._list_form else None)
            if self._is_list and not self._list_form:
                self._buffer = stripped
            if self._state == "start" and stripped.startswith("{"):
                self._state = "call"
                return ""
            keep = 0
            if stripped:
                self._state = "content"
            elif not is_last:
                return ""
        content = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(content) :]
        return content

    def _find_list(self, is_last: bool) -> str:
        """Look at the beginning of the answer for a list of calls."""
        text = self._buffer.lstrip()
        tag = next((tag for tag in _LIST_TAGS if text.startswith(tag)), "")
        text = text[len(tag) :].lstrip()
        is_open = not text or (text.startswith("[") and not text[1:].strip())
        if self._list_form == "pythonic" and text.startswith("["):
            calls = _python_calls(text, self._names) if is_last else []
            if calls:
                self._buffer = ""
                for name, arguments in calls:
                    self._begin_call(name)
                    self._deltas.append({"index": self.call_count - 1, "function": {"arguments": arguments}})
                self._state = "content"
                return ""
            is_open = is_open or (_PYTHON_CALLS.match(text) is not None and len(text) <= _MAX_PYTHON_CHARACTERS)
        elif text.startswith("[") and text[1:].lstrip().startswith("{"):
            self._list_head = self._buffer[: self._buffer.index("{", len(self._buffer) - len(text))]
            self._buffer = self._buffer[len(self._list_head) :]
            self._state, self._is_list = "call", True
            return ""
        elif self._list_form == "mistral" and (named := _NAMED_CALL.match(text)) and (name := self._name(named[1])):
            self._buffer = text[named.end() :]
            self._begin_call(name)
            return ""
        elif self._list_form == "mistral" and "{" not in text and len(text) < _MAX_NAMED_HEAD:
            is_open = is_open or any(name.startswith(text) or text.startswith(name) for name in self._names)
        is_open = is_open or (not tag and any(item.startswith(text) for item in _LIST_TAGS))
        if not is_open and self._list_form == "pythonic" and text.startswith("["):
            is_open = re.fullmatch(r"\[\s*[A-Za-z_][A-Za-z0-9_.-]{0,63}", text) is not None
        if is_last or not is_open:
            self._state = "content"
        return ""

    def _name(self, text: str) -> str:
        """Return the name of the tool, which an id may follow; "" if there is no such tool."""
        return next((name for name in (text, text[:-9]) if name in self._names), "")

    def _read_head(self, is_last: bool) -> str:
        head = _HEAD.match(self._buffer)
        if head is not None and head[1] in self._names:
            self._buffer = self._buffer[head.end() :]
            self._begin_call(head[1])
            return ""
        end = self._buffer.find(_END) if self._has_tags else -1
        if end >= 0 and (tagged := _tagged_call(self._buffer[:end], self._tools)) is not None:
            self._begin_call(tagged[0])
            self._deltas.append({"index": self.call_count - 1, "function": {"arguments": tagged[1]}})
            self._buffer, self._state = self._buffer[end:], "after"
            return ""
        text = self._buffer[:end] if end >= 0 else self._buffer
        if self._is_list:
            text = text[: _ObjectScanner().find_end(text)]  # without the comma or bracket behind it
        call = _whole_call(text)
        if call is not None and call[0] in self._names:
            self._begin_call(call[0])
            self._deltas.append({"index": self.call_count - 1, "function": {"arguments": call[1]}})
            self._buffer, self._state = self._buffer[len(text) :], "after"
            return ""
        if not (is_last or end >= 0 or call is not None):
            return ""
        # Not a call of one of the tools.
        after = end + len(_END) if end >= 0 else len(self._buffer)
        content = (_START if self._has_tags else self._list_head if not self.call_count else "") + self._buffer[:after]
        self._buffer, self._state = self._buffer[after:], "content"
        return content

    def _begin_call(self, name: str) -> None:
        self._deltas.append(
            {
                "index": self.call_count,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        )
        self.call_count += 1
        self._scanner = _ObjectScanner()
        self._state = "arguments"


class _ObjectScanner:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_in_text = False
        self._is_escaped = False

    def find_end(self, text: str) -> int:
        """Return the index after the object's last character in this piece; the piece's length if it does not end."""
        for place, character in enumerate(text):
            if self._is_in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_in_text = False
            elif character == '"':
                self._is_in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_complete = True
                    return place + 1
        return len(text)


def _whole_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a JSON object that is complete; None if it is not, or is no call."""
    if not text.rstrip().endswith("}"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    name = value.get("name") if isinstance(value, dict) else None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    return (str(name), arguments) if isinstance(arguments, str) else None


def _tagged_call(text: str, tools: Tools) -> tuple[str, str] | None:
    """Return name and arguments of `<function=NAME><parameter=KEY>VALUE</parameter></function>`; None if it is no call
    of one of the tools. A value is text, or JSON where the tool's schema says that it is no text."""
    before, _, rest = text.partition("<function=")
    name, closed, body = rest.partition(">")
    function = next((item["function"] for item in tools.items if item["function"]["name"] == name), None)
    if before.strip() or not closed or function is None:
        return None
    described = _parameters(function)
    properties = described.get("properties")
    arguments: dict[str, Any] = {}
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        schema = properties.get(key) if isinstance(properties, dict) else None
        arguments[key] = value
        if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
            with contextlib.suppress(ValueError, RecursionError):
                arguments[key] = json.loads(value)
    return name, json.dumps(arguments, ensure_ascii=False)


def _python_calls(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """Return name and arguments of each call of a whole list in Python's syntax; none if it is no such list, or one is
    no call of these functions."""
    body = text.rstrip()
    tag = body.rfind("<|tool_call_end|>")
    body = body[:tag] if tag >= 0 else body
    if not body.endswith("]") or len(body) > _MAX_PYTHON_CHARACTERS:
        return []
    try:
        parsed = ast.parse(body, mode="eval").body
        if not isinstance(parsed, ast.List):
            return []
        found = []
        for call in parsed.elts:
            if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) not in names:
                return []
            arguments = {item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg is not None}
            found.append((ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return found
