"""Edit of the text of a sources file: exchanges the zones and lines of one source, and keeps everything else, with its
comments.

The text is not parsed as TOML does it, only searched for the headers of tables. So the result is parsed and compared
with what it must say; a file that is written in another way is refused, never damaged.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_server.config.toml_file import parse_toml
from edge_server.plugins.cameras.zones.zone_settings import (
    LineEntry,
    ZoneEntry,
    entries_as_plain,
    parse_lines,
    parse_zones,
)

_HEADER = re.compile(r"\s*\[\[?([\w.\s\"'-]+)\]\]?\s*(#.*)?$")
_KEYS = ("zones", "lines")


class CannotEdit(Exception):
    """The text cannot be edited so that only the zones and lines of the source change."""


@dataclass(slots=True)
class _Block:
    """A table of the file: `lines` are its header and its keys, `rest` the comments above the next header."""

    name: str
    lines: list[str]
    rest: list[str]

    def text(self) -> str:
        return "".join((*self.lines, *self.rest))


def edit_zones(text: str, source: str, zones: Sequence[ZoneEntry], lines: Sequence[LineEntry]) -> str:
    """Return the text with these zones and lines of a source. Raises CannotEdit, and ValueError for a text that is not
    TOML.

    Tables of zones that stay the same are not touched. Others keep their comments on lines of their own.
    """
    document = parse_toml(text)
    sources = _tables(document, "sources")
    names = [table.get("name") for table in sources]
    if names.count(source) != 1:
        raise CannotEdit(f"it has no source '{source}'")
    number = names.index(source)
    blocks = list(_split(text))
    starts = [index for index, block in enumerate(blocks) if block.name == "sources"]
    if len(starts) != len(names):
        raise CannotEdit("its sources are not tables [[sources]]")
    first = starts[number]
    last = first + 1
    while last < len(blocks) and blocks[last].name.startswith("sources."):
        last += 1
    newline = "\r\n" if "\r\n" in text else "\n"
    old = {f"sources.{key}": iter(_tables(sources[number], key)) for key in _KEYS}
    new: dict[str, dict[str, dict[str, object]]] = {
        "sources.zones": {str(table["name"]): table for table in entries_as_plain(zones)},
        "sources.lines": {str(table["name"]): table for table in entries_as_plain(lines)},
    }
    kept: list[_Block] = []
    for block in blocks[first:last]:
        if block.name not in new:
            kept.append(block)
            continue
        before = next(old[block.name], {})
        after = new[block.name].pop(str(before.get("name")), None)
        if after is None:
            kept[-1].rest += block.rest
            continue
        parse = parse_zones if block.name == "sources.zones" else parse_lines
        if parse([dict(before)]) != parse([dict(after)]):
            header, *others = block.lines
            comments = [line for line in others if line.lstrip().startswith("#")]
            block.lines = [header, *comments, *_key_lines(after, newline)]
        kept.append(block)
    for name, table in [(name, table) for name, tables in new.items() for table in tables.values()]:
        end = kept[-1]
        if end.lines and not end.lines[-1].endswith("\n"):
            end.lines[-1] += newline
        kept.append(_Block(name, [newline, f"[[{name}]]{newline}", *_key_lines(table, newline)], end.rest))
        end.rest = []
    edited = "".join(block.text() for block in (*blocks[:first], *kept, *blocks[last:]))
    _check(document, edited, number, zones, lines)
    return edited


def _tables(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tables [[key]], none if the key is missing. Raises CannotEdit if it has another value."""
    tables = document.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise CannotEdit(f"its {key} are not tables [[{key}]]")
    return tables


def _split(text: str) -> Iterator[_Block]:
    """Yield the part above the first header, with an empty name, and then each table."""
    name, lines = "", list[str]()
    for line in io.StringIO(text):
        found = _HEADER.match(line.rstrip("\r\n"))
        if found is not None:
            yield _block(name, lines)
            name, lines = found[1].strip(), []
        lines.append(line)
    yield _block(name, lines)


def _block(name: str, lines: list[str]) -> _Block:
    end = len(lines)
    while end > 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return _Block(name, lines[:end], lines[end:])


def _key_lines(table: Mapping[str, object], newline: str) -> list[str]:
    # Strings, numbers and arrays of them are written in TOML as in JSON.
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}{newline}" for key, value in table.items()]


def _check(
    before: dict[str, Any], edited: str, index: int, zones: Sequence[ZoneEntry], lines: Sequence[LineEntry]
) -> None:
    try:
        after = parse_toml(edited)
        table = after["sources"][index]
        found = _by_name(parse_zones(table.pop("zones", []))), _by_name(parse_lines(table.pop("lines", [])))
    except (ValueError, LookupError, TypeError):
        raise CannotEdit("its zones are not written as tables [[sources.zones]]") from None
    rest = {**before, "sources": [dict(one) for one in before["sources"]]}
    for key in _KEYS:
        rest["sources"][index].pop(key, None)
    if after != rest or found != (_by_name(zones), _by_name(lines)):
        raise CannotEdit("its zones are not written as tables [[sources.zones]]")


def _by_name(entries: Sequence[ZoneEntry] | Sequence[LineEntry]) -> dict[str, ZoneEntry | LineEntry]:
    return {entry.name: entry for entry in entries}
