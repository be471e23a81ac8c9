"""Parser of the part of YAML that exporters write: block mappings and lists of plain or quoted scalars, and flow lists
of scalars. All scalars stay texts.

PyYAML is not in the base install. Anchors, tags, block scalars and several documents are refused.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from edge_server.plugins.vision.exporters.exported_metadata import UnfitMetadataError, quote

Node: TypeAlias = "str | list[Node] | dict[str, Node]"

MAX_LINES = 20_000
MAX_DEPTH = 16

_KEY = re.compile(r"""((?:'(?:[^']|'')*'|"[^"\\]*"|-?\d+)\s*|[^\s'"#\[\]{},&*!|>%@`-][^:#]*):(?:\s+|$)""")


def parse_yaml(text: str) -> dict[str, Node]:
    """Return the mapping of a document. Raises UnfitMetadataError, which names the line."""
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if number > MAX_LINES:
            raise UnfitMetadataError(f"expected at most {MAX_LINES} lines of YAML, given more")
        content = line.strip()
        if content and not content.startswith("#") and content != "---":
            lines.append((number, len(line) - len(line.lstrip(" ")), content))
    parser = _Parser(lines)
    node = parser.parse_block(0, 0) if lines else {}
    if not isinstance(node, dict) or parser.index < len(lines):
        raise parser.error("a mapping")
    return node


class _Parser:
    def __init__(self, lines: list[tuple[int, int, str]]) -> None:
        self._lines = lines
        self.index = 0

    def error(self, expected: str) -> UnfitMetadataError:
        number, _, content = self._lines[min(self.index, len(self._lines) - 1)]
        return UnfitMetadataError(f"expected {expected} in line {number} of YAML, given {quote(content)}")

    def parse_block(self, indent: int, depth: int) -> Node:
        """Return the mapping or list whose lines begin at `indent`."""
        if depth > MAX_DEPTH:
            raise self.error(f"at most {MAX_DEPTH} levels")
        if self._is_item(indent):
            return self._parse_list(indent, depth)
        found: dict[str, Node] = {}
        while self.index < len(self._lines) and self._lines[self.index][1] == indent and not self._is_item(indent):
            content = self._lines[self.index][2]
            match = _KEY.match(content)
            if match is None:
                raise self.error("'key: value'")
            key = _unquote(match[1].strip())
            if key in found:
                raise self.error(f"the key {quote(key)} once")
            found[key] = self._parse_value(content[match.end() :], indent, depth)
        return found

    def _parse_list(self, indent: int, depth: int) -> list[Node]:
        found: list[Node] = []
        while self.index < len(self._lines) and self._lines[self.index][1] == indent and self._is_item(indent):
            number, _, content = self._lines[self.index]
            rest = content[1:].lstrip()
            if _KEY.match(rest):
                # The item is a mapping whose first key stands beside the dash.
                inner = indent + len(content) - len(rest)
                self._lines[self.index] = (number, inner, rest)
                found.append(self.parse_block(inner, depth + 1))
            else:
                found.append(self._parse_value(rest, indent, depth))
        return found

    def _is_item(self, indent: int) -> bool:
        _, at, content = self._lines[self.index]
        return at == indent and (content == "-" or content.startswith("- "))

    def _parse_value(self, text: str, indent: int, depth: int) -> Node:
        """Return the value that begins with `text`, and go on to the next line."""
        if text and not text.startswith("#"):
            value = self._parse_scalar_or_flow(text)
            self.index += 1
            return value
        self.index += 1
        if self.index == len(self._lines):
            return ""
        inner = self._lines[self.index][1]
        if inner > indent or (inner == indent and self._is_item(indent)):
            return self.parse_block(inner, depth + 1)
        return ""

    def _parse_scalar_or_flow(self, text: str) -> Node:
        if text[0] == "[":
            if text[-1] != "]" or "[" in text[1:] or "{" in text:
                raise self.error("a list of scalars")
            return [_unquote(part.strip()) for part in text[1:-1].split(",") if part.strip()]
        if text in ("{}", "null", "~"):
            return ""
        if text[0] in "{&*!|>%@`":
            raise self.error("a scalar")
        return _unquote(text)


def _unquote(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    return text.partition(" #")[0].rstrip()
