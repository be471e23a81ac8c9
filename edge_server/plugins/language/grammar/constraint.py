"""Constraint of a text: its grammar, in the notation of the package llguidance, and the check of a text against it.

A JSON schema, a regular expression, a list of texts, or rules in GBNF become a grammar in llguidance's dialect of Lark
(https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md), which llama.cpp takes too. A
keyword of a schema that the library cannot hold is an error, and never left out. Checked against llguidance 1.9.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, TypeAlias

from edge_server.backends.runtime_errors import import_runtime
from edge_server.errors import BadSchema
from edge_server.plugins.language.engines.token_engine import Place, Sampling

MAX_SCHEMA_BYTES = 65_536
"""Of a schema as JSON text."""
MAX_DEPTH = 64
"""Of values inside each other in a schema."""
MAX_PARTS = 1_500
"""Objects and items of lists in a schema. The library follows references with its stack, which 4,000 of them end."""
MAX_MULTIPLE = 1_000
"""Least common multiple of all `multipleOf` in a schema, without decimal point and zeros at the end. The library's
states grow with it, whatever its limits: 999,983 takes 29 s and 400 MB."""
MAX_TEXT_BYTES = 16_384
"""Of a regular expression, or of all texts of a choice."""
MAX_CHOICES = 1_000
MAX_GRAMMAR_BYTES = 8_192
MAX_RULES = 100
"""Of a grammar. The time to convert it grows with their square."""
MAX_WRITTEN_OUT = 100_000
"""Characters of a rule without recursion, when the rules that it names are written out, as the library does."""

_LIMITS = {"initial_lexer_fuel": 200_000, "max_grammar_size": 8_000, "max_lexer_states": 20_000}
"""Of the library, for 50 ms of processor time and 30 MB. llama.cpp has the library's own, which are higher."""
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "json-pointer", "relative-json-pointer"),
    "regex",
}
"""Those that JSON Schema defines. Any other, as pydantic's `password`, says nothing of a text."""
_VALUES = {"const", "enum", "default", "examples"}
"""Keywords whose values are no schemas."""
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords whose values are schemas by names, which may be those of keywords."""
_COMPACT = {"whitespace_flexible": False}
"""JSON without white space, of which small models write lines and lines."""
_LARK_HEAD = "%llguidance {}\n"
_UNKNOWN_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')
_POSITION = re.compile(r"^(?:at )?[0-9]+\([0-9]+\): (?:failed to compile JSON schema: )?")
_REASON = re.compile(r"^error: (.*)", re.MULTILINE)
_STRING_OR_NUMBER = re.compile(
    r'("(?:[^"\\]|\\.)*")|(-?[0-9]{1,400}(?:\.[0-9]{1,400}(?:[eE][+-]?[0-9]{1,3})?|[eE][+-]?[0-9]{1,3}))([^0-9eE]|$)'
)
_MAX_ZEROS = 8
"""At the end of a fraction, with which it is tried."""
_GBNF_PART = re.compile(r'("(?:[^"\\]|\\.)*")|(\[(?:[^\]\\]|\\.)*\])|#[^\n]*|\s+')
_GBNF_RULE = re.compile(r"[A-Za-z0-9_-]+\s*::=")
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\[\]^-])|.)", re.DOTALL)
_LARK_RULE = re.compile(r"^([A-Za-z0-9_]+): ", re.MULTILINE)
_PATTERN_PART = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]?|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{[0-9a-fA-F]{1,6}\}|.)|.", re.DOTALL
)
_ESCAPED = re.compile(r"[\"\x00-\x1f]|\\(?:[\\\"nrtfvxu])")
_URI = r"^[a-z][a-z0-9+.-]{0,15}://[A-Za-z0-9._~-]*(:[0-9]{1,5})?(/[A-Za-z0-9._~-]*)*(\?[A-Za-z0-9._~=&-]*)?$"
"""Some of the URIs."""

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the schema's root to a value."""


class ConstraintFailure(ValueError):
    """A text does not fit its constraint. Its message says how."""


class ConstraintCheck:
    """Check of texts against the constraint of their request, one after another, while they arrive."""

    def __init__(self, sampling: Sampling, place: Place) -> None:
        """Raises BadSchema for a constraint that cannot be kept."""
        library = import_runtime("llguidance", "LLMatcher", "llm-gguf")
        self._name = sampling.constraint
        self._is_json = self._name == "json_schema"
        self._text = ""
        grammar = library.LLMatcher.grammar_from_lark(_lark(sampling, place, compact=False))
        limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._matcher = library.LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=limits)
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # of the first byte, for which alone some grammars are too large
        if self._matcher.is_error():
            said = self._matcher.get_error()
            keyword = _UNKNOWN_KEYS.search(said)
            if keyword is not None and self._is_json:
                path = _find_key(json.loads(sampling.json_schema), keyword[1])
                raise BadSchema(place(path), f"the keyword '{keyword[1]}' cannot be enforced; leave it out")
            where = place(()) if self._is_json else self._name
            raise BadSchema(where, f"cannot be enforced: {_reason(said)}")

    def add(self, text: str) -> None:
        """Add text. Raises ConstraintFailure if none that fits begins like this; for JSON only `finish` tells it."""
        if self._is_json:
            # A character may be written in several ways, of which the library knows one.
            self._text += text
        else:
            self._consume(text)

    def finish(self) -> None:
        """End a text. Raise ConstraintFailure unless it is whole and fits."""
        if self._is_json:
            try:
                json.loads(self._text, object_pairs_hook=_without_duplicates)
                text, place, self._text = self._text.strip(), 0, ""
                for found in _STRING_OR_NUMBER.finditer(text):
                    self._consume(text[place : found.start()])
                    self._consume(_quote(json.loads(found[1])) if found[1] else self._known_number(found[2], found[3]))
                    place = found.end()
                self._consume(text[place:])
            except (ValueError, RecursionError) as error:
                if isinstance(error, ConstraintFailure):
                    raise
                raise ConstraintFailure(f"{self._name}: no JSON: {error}") from None
        if not self._matcher.is_accepting():
            raise ConstraintFailure(f"{self._name}: the text ends too early")
        self._matcher.reset()

    def _known_number(self, number: str, following: str) -> str:
        """Return a number and the character after it as the library knows them: for many limits and values it takes
        no exponent, between some it takes 0.7 but not 0.70, between others 0.70 alone."""
        plain = format(Decimal(number) or Decimal(0), "f")  # -0 is 0
        plain = plain.rstrip("0") if "." in plain else f"{plain}."
        for tried in (number, plain.removesuffix("."), *(plain + "0" * count for count in range(1, _MAX_ZEROS))):
            content = list((tried + following).encode())
            taken = self._matcher.try_consume_tokens(content)
            fits = taken == len(content) and (following != "" or self._matcher.is_accepting())
            self._matcher.rollback(taken)
            if fits:
                return tried + following
        return number + following

    def _consume(self, text: str) -> None:
        content = text.encode("utf-8", "surrogatepass")
        taken = self._matcher.try_consume_tokens(list(content))
        if taken < len(content):
            while taken and content[taken] & 0xC0 == 0x80:  # within a character
                taken -= 1
            rest = content[taken : taken + 40].decode("utf-8", "replace")
            raise ConstraintFailure(f"{self._name}: the text does not fit from {rest!r} on")


def llama_cpp_grammar(sampling: Sampling, place: Place) -> str:
    """Return the grammar of a sampling's constraint for llama.cpp. JSON is without white space. Raises BadSchema."""
    return _lark(sampling, place, compact=True)


def _lark(sampling: Sampling, place: Place, *, compact: bool) -> str:
    """Return the constraint as a grammar in Lark. Raises BadSchema for one beyond the limits of this module."""
    if sampling.json_schema:
        schema = _read_schema(sampling.json_schema, place)
        if compact:
            _narrow(schema, place)
        # The member of the schema's author could ask to leave keywords out.
        schema = {**schema, "x-guidance": _COMPACT if compact else {}}
        return f"{_LARK_HEAD}start: %json {json.dumps(schema)}"
    if sampling.choice:
        texts = [_quote(text) for text in sampling.choice]
        if len(texts) > MAX_CHOICES:
            raise BadSchema("choice", f"expected at most {MAX_CHOICES:,} texts, got {len(texts):,}")
        _check_size("choice", "".join(texts), MAX_TEXT_BYTES)
        return f"{_LARK_HEAD}start: TEXT\nTEXT: {' | '.join(texts)}"
    if sampling.regex:
        _check_size("regex", sampling.regex, MAX_TEXT_BYTES)
        library = import_runtime("llguidance", "regex_to_lark", "llm-gguf")
        return f"{_LARK_HEAD}start: /{library.regex_to_lark(sampling.regex, 'dws')}/"
    _check_size("grammar", sampling.grammar, MAX_GRAMMAR_BYTES)
    return _gbnf_to_lark(sampling.grammar)


def _read_schema(text: str, place: Place) -> dict[str, Any]:
    """Return a schema within the limits of this module. Raises BadSchema."""
    if (size := len(text.encode())) > MAX_SCHEMA_BYTES:
        raise BadSchema(place(()), f"expected a schema of at most {MAX_SCHEMA_BYTES:,} bytes, got {size:,}")
    schema: dict[str, Any] = json.loads(text)
    multiple, total = 1, 0
    for count, (path, value) in enumerate(_walk(schema), 1):
        if count > MAX_PARTS:
            raise BadSchema(place(path), f"a schema may have at most {MAX_PARTS:,} parts, this one has more")
        if len(path) > MAX_DEPTH:
            raise BadSchema(place(path[:MAX_DEPTH]), f"the schema is nested more than {MAX_DEPTH} deep")
        if not isinstance(value, dict):
            continue
        if isinstance(form := value.get("format"), str) and form not in _FORMATS and not _is_in_value(path):
            del value["format"]
        divisor = value.get("multipleOf")
        if isinstance(divisor, int | float) and math.isfinite(divisor) and divisor > 0:
            digits = int("".join(map(str, Decimal(str(divisor)).normalize().as_tuple().digits)))
            multiple, total = math.lcm(multiple, digits), total + digits
            if max(multiple, total) > MAX_MULTIPLE:
                problem = f"cannot be enforced: the least common multiple and the sum are at most {MAX_MULTIPLE:,}"
                raise BadSchema(place((*path, "multipleOf")), problem)
    return schema


def _narrow(schema: dict[str, Any], place: Place) -> None:
    """Change a schema into one that llama.cpp's llguidance, of version 1.0, holds too.

    Each text of the new schema fits the old one. That version fails for an integer type beside a fraction, for the
    format uri, and for multiples below 0 alone; llama.cpp then leaves out the whole grammar. In patterns it forgets
    what follows a character that JSON escapes, unless that is in a class of two. Raises BadSchema for what has no other
    form.
    """
    nodes = [(path, value) for path, value in _walk(schema) if isinstance(value, dict) and not _is_in_value(path)]
    for path, value in nodes:
        if "type" in value:
            stated = value["type"]
            types = set(stated if isinstance(stated, list) else [stated])
            if isinstance(value.get("enum"), list):
                value["enum"] = [item for item in value["enum"] if types & types_of(item)]
            if "const" in value and not types & types_of(value["const"]):
                del value["const"]
                value["enum"] = []
            if "number" not in types:
                for key, rounded in _ROUNDED.items():
                    if isinstance(limit := value.get(key), float) and math.isfinite(limit):
                        value[key] = rounded(limit)
        if "multipleOf" in value and any(
            isinstance(limit := value.get(key), int | float)
            and (limit < 0 or (key == "exclusiveMaximum" and limit == 0))
            for key in ("maximum", "exclusiveMaximum")
        ):
            raise BadSchema(place((*path, "multipleOf")), "cannot be enforced for numbers below 0 alone")
        patterns = [value.pop("pattern")] if isinstance(value.get("pattern"), str) else []
        if value.get("format") == "uri":
            del value["format"]
            patterns.append(_URI)
        widened = [_PATTERN_PART.sub(_widen, pattern) for pattern in patterns]
        if widened != patterns:
            widened.append(r"^[^\x00]*$")
        if widened:
            value["pattern"], *more = widened
        if widened[1:]:
            value["allOf"] = [*value.get("allOf", []), *({"pattern": pattern} for pattern in more)]
        names = value.get("patternProperties")
        for name in names if isinstance(names, dict) else ():
            if _PATTERN_PART.sub(_widen, name) != name:
                problem = "a character that JSON escapes cannot be enforced in a name's pattern"
                raise BadSchema(place((*path, "patternProperties", name)), problem)
    anywhere = frozenset().union(*(traits for _, value in nodes for traits in _own_traits(value)))
    for path, value in nodes:
        _check_parts(value, path, place, anywhere)


_APART: Mapping[str, tuple[str, str]] = {
    "integer": ("fraction", "'type' integer cannot be enforced where another part has a fraction in enum or const"),
    "patterns": (
        "closed",
        "'patternProperties' cannot be enforced where another part has additionalProperties, or an object in enum or "
        "const",
    ),
}
"""Trait of a schema -> trait of another one for the same value beside which that version fails, and the problem."""


def _own_traits(schema: Mapping[str, Any]) -> list[frozenset[str]]:
    """Return the traits of the values that a schema lists, and of its other keywords."""
    listed = schema["enum"] if isinstance(schema.get("enum"), list) else []
    listed = [*listed, *([schema["const"]] if "const" in schema else [])]
    stated = schema.get("type")
    types = stated if isinstance(stated, list) else [stated]
    has = {
        "fraction": any("number" in types_of(item) and "integer" not in types_of(item) for item in listed),
        "closed": any(isinstance(item, dict) for item in listed),
    }
    other = {
        "integer": "integer" in types and "number" not in types,
        "patterns": "patternProperties" in schema,
        "closed": "additionalProperties" in schema,
    }
    return [frozenset(name for name, is_there in part.items() if is_there) for part in (has, other)]


def _check_parts(schema: Any, path: Path, place: Place, anywhere: frozenset[str]) -> frozenset[str]:
    """Return the traits of a schema and its parts for the same value; those of a reference are `anywhere`.

    Raises BadSchema for two that cannot be enforced together.
    """
    if not isinstance(schema, dict):
        return frozenset()
    parts = [*_own_traits(schema), anywhere if "$ref" in schema else frozenset()]
    for key in ("allOf", "anyOf", "oneOf"):
        items = schema[key] if isinstance(schema.get(key), list) else []
        found = [_check_parts(item, (*path, key, index), place, anywhere) for index, item in enumerate(items)]
        parts += found if key == "allOf" else [frozenset().union(*found)]
    for one, other in itertools.permutations(parts, 2):
        for trait, (opposite, problem) in _APART.items():
            if trait in one and opposite in other:
                raise BadSchema(place(path), f"the keyword {problem}")
    return frozenset().union(*parts)


_ROUNDED: Mapping[str, Callable[[float], int]] = {
    "minimum": math.ceil,
    "exclusiveMaximum": math.ceil,
    "maximum": math.floor,
    "exclusiveMinimum": math.floor,
}
"""Limit -> how it is rounded for an integer."""


def _widen(part: re.Match[str]) -> str:
    """Return a part of a pattern. NUL stands in a class with a character that JSON escapes; no text has it."""
    text = part[0]
    if not _ESCAPED.search(text) or text.startswith("[^"):
        return text
    if not text.startswith("["):
        return f"[{text}\\x00]"
    return f"[\\x00\\{text[1:]}" if text[1] == "]" else f"[\\x00{text[1:]}"


def types_of(value: object) -> set[str]:
    """Return the names of JSON Schema's types that a value has."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _is_in_value(path: Path) -> bool:
    """Return whether a part of a schema is in the value of a keyword, and so no schema."""
    return any(key in _VALUES and (not place or path[place - 1] not in _NAMED) for place, key in enumerate(path))


def _walk(schema: object) -> Iterator[tuple[Path, Any]]:
    """Yield each object and each item of a list in a schema, with its path."""
    left: list[tuple[Path, Any]] = [((), schema)]
    while left:
        path, value = left.pop()
        yield path, value
        children = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
        is_list = isinstance(value, list)
        left += [((*path, key), child) for key, child in children if is_list or isinstance(child, dict | list)]


def _find_key(schema: object, key: str) -> Path:
    """Return the path of a keyword in a schema."""
    return next(((*path, key) for path, value in _walk(schema) if isinstance(value, dict) and key in value), (key,))


def _check_size(name: str, text: str, most: int) -> None:
    if not text.isascii() and text != text.encode("utf-8", "replace").decode():
        raise BadSchema(name, "expected Unicode text, got half of a surrogate pair")
    if (size := len(text.encode())) > most:
        raise BadSchema(name, f"expected at most {most:,} bytes, got {size:,}")


def _gbnf_to_lark(grammar: str) -> str:
    """Return rules in GBNF as Lark, whose rule `start` is their `root`. Raises BadSchema."""
    # Imported for a request with a grammar only.
    converter = import_runtime("llguidance.gbnf_to_lark", "gbnf_to_lark", "llm-gguf")
    plain = _GBNF_PART.sub(lambda part: _plain_gbnf(part, grammar), grammar).strip()
    if plain.count("::=") > MAX_RULES:
        raise BadSchema("grammar", f"expected at most {MAX_RULES} rules, got more")
    try:
        lark = str(converter.gbnf_to_lark(plain))
    except Exception as error:  # noqa: BLE001 - it raises exceptions of no common class
        raise BadSchema("grammar", f"expected rules in GBNF: {_reason(str(error))}") from None
    _, *parts = _LARK_RULE.split(lark)
    rules = dict(zip(parts[::2], parts[1::2], strict=True))
    sizes: dict[str, int] = {}
    names = {name: [found for found in re.findall(r"\w+", text) if found in rules] for name, text in rules.items()}
    # Rules that lead to themselves stay names.
    while ready := [name for name, used in names.items() if name not in sizes and sizes.keys() >= set(used)]:
        for name in ready:
            sizes[name] = len(rules[name]) + sum(sizes[found] for found in names[name])
            if name.isupper() and sizes[name] > MAX_WRITTEN_OUT:
                raise BadSchema(
                    "grammar", f"a rule has more than {MAX_WRITTEN_OUT:,} characters when it is written out"
                )
    return lark


def _plain_gbnf(part: re.Match[str], grammar: str) -> str:
    """Return a text, class, comment or white space of GBNF in the form that the library's converter reads."""
    if part[1] or part[2]:
        return _GBNF_ESCAPE.sub(lambda escape: _plain_escape(escape, is_class=bool(part[2])), part[0])
    if part[0].startswith("#") or "\n" not in part[0]:
        return " "
    # A rule may go on in the next line.
    return "\n" if _GBNF_RULE.match(grammar, part.end()) else " "


def _plain_escape(escape: re.Match[str], *, is_class: bool) -> str:
    if escape[4]:
        return f"\\x{ord(escape[4]):02x}" if is_class else escape[4]
    if not escape.lastindex:
        return escape[0]
    point = int(escape[1] or escape[2] or escape[3], 16)
    return f"\\x{point:02x}" if point < 0x80 else chr(min(point, 0x10FFFF))


@cache
def _byte_tokenizer() -> Any:
    """Return the library's tokenizer with a token for each byte, so that a text is checked without a model's."""
    library = import_runtime("llguidance", "LLTokenizer", "llm-gguf")
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()), slices=[])


class _Bytes:
    """What the library's TokenizerWrapper wants of a tokenizer."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids: Sequence[int] = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _quote(text: str) -> str:
    """Return a JSON string with an escape only where it must have one, as the library writes and reads it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> Mapping[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ConstraintFailure(f"json_schema: the name {twice[:80]!r} occurs twice in an object")
    return found


def _reason(said: str) -> str:
    """Return the library's reason, without the grammar that stands around it."""
    reason = _REASON.search(said)
    return _POSITION.sub("", reason[1] if reason is not None else said.partition("\n")[0])[:300]
