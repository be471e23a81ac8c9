"""Conversion of what constrains an answer to a grammar for OpenVINO GenAI.

Its library for grammars, xgrammar, reads JSON schemas too, but leaves out many keywords without a word, and has no
option for JSON without white space, of which small models write lines and lines. So a schema becomes rules of EBNF
(https://xgrammar.mlc.ai/docs) here. Their texts are compact JSON that fits the schema, though not all such texts:
objects have their properties in the order of the schema, and no others unless `additionalProperties` asks for them.
What this module cannot hold is refused.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from edge_server.errors import BadSchema
from edge_server.plugins.language.engines.token_engine import Place, Sampling
from edge_server.plugins.language.grammar.constraint import Path, types_of
from edge_server.plugins.language.grammar.pattern_grammar import (
    BadPattern,
    Ranges,
    character_class,
    literal,
    pattern_grammar,
    repeated,
    without,
)

MAX_DEPTH = 32
"""Of subschemas inside each other."""
MAX_RULES = 4_000
"""Of a grammar."""
MAX_STEPS = 20_000
"""Of the conversion: subschemas that are read, also again through references of a oneOf."""
MAX_WIDTH = 64
"""Characters that patterns count, and their optional parts, in all rules together. A character costs
27 ms of processor time with 49,000 tokens, once a grammar, in which the other answers of the engine wait. 500 optional
parts cost minutes."""
MAX_ITEMS = 1_000
"""Largest minItems, maxItems, minProperties and maxProperties."""
MAX_LENGTH = 10_000
"""Largest maxLength."""
MAX_COPIES = 10_000
"""Items of arrays, and blocks of 16 characters of strings, that are counted, in all rules together. 11,000 cost 0.5 s
of processor time, 56,000 more than 15 s."""
_MAX_VALUES = 1_000
"""Multiples between two limits that are written out."""
_MAX_BRANCHES = 50
"""Of a text of an enum that begins like others."""
_MAX_DIGITS = 15
"""Of numbers: doubles hold as many."""
_MAX_FRACTION = 6
"""Digits behind the point of numbers with limits that have no more themselves."""

_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$id",
                          "$schema", "$comment", "$defs", "definitions", "$anchor", "$vocabulary", "contentEncoding",
                          "contentMediaType", "contentSchema", "then", "else", "minContains",
                          "maxContains"))  # fmt: skip
"""Also those that mean nothing without others that are refused."""
_REFUSED = frozenset(("not", "if", "contains", "propertyNames", "patternProperties", "dependentSchemas", "dependencies",
                      "dependentRequired", "uniqueItems", "unevaluatedItems", "unevaluatedProperties",
                      "$dynamicRef", "$recursiveRef", "additionalItems"))  # fmt: skip
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
}  # fmt: skip
"""Type -> keywords for it that are held."""
_COMBINED = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_HELD = _COMBINED.union(("enum", "const", "type"), *_KEYWORDS.values())

_DATE = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P([1-9][0-9]{0,3}D(T[1-9][0-9]{0,3}[HMS])?|T[1-9][0-9]{0,3}[HMS]|[1-9][0-9]{0,3}[WMY])$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": r"^(0|[1-9a-f][0-9a-f]{0,3})(:(0|[1-9a-f][0-9a-f]{0,3})){7}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
    "email": rf"^[a-z0-9_+-]{{1,20}}(\.[a-z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}$",
    "uri": rf"^https?://{_LABEL}(\.{_LABEL}){{0,3}}(:[1-9][0-9]{{1,3}})?$",
}
"""Format -> pattern of some of its texts. That of a URI goes on with a path."""
_PATH = "[A-Za-z0-9_.~/-]"
_MAX_PATH = 1_000
"""Characters of the path of a URI whose length has a limit."""
_REFUSED_FORMATS = frozenset(("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
                              "json-pointer", "relative-json-pointer", "regex"))  # fmt: skip
"""The others of JSON Schema. A format that it does not define says nothing."""

_PLAIN: Ranges = without(((0x20, 0x10FFFF),), ((0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)))
_CHARACTER = character_class(_PLAIN)
"""A character of a string with limits: none that JSON escapes."""

_BASE = rf"""
any ::= object | array | string | number | "true" | "false" | "null"
object ::= "{{" (member ("," member)*)? "}}"
member ::= string ":" any
array ::= "[" (any ("," any)*)? "]"
string ::= "\"" character* "\""
plain ::= {_CHARACTER}
eight ::= {_CHARACTER}{{8}}
sixteen ::= eight eight
fewer ::= {_CHARACTER}{{0,7}}
part ::= fewer | eight fewer
path ::= {_PATH}
character ::= {_CHARACTER} | "\\" (["\\/bfnrt] | "u" [0-9a-cA-CeEfF] hex hex hex)
hex ::= [0-9a-fA-F]
positive ::= [1-9] [0-9]{{0,17}}
integer ::= "0" | "-"? positive
number ::= "-"? ("0" | [1-9] [0-9]{{0,14}}) ("." [0-9]{{1,15}})? ([eE] [+-]? [0-9]{{1,2}})?
"""


def openvino_grammar(sampling: Sampling, place: Place) -> str:
    """Return the text for `StructuredOutputConfig(grammar=...)`. Raises BadSchema.

    `ConstraintCheck` has taken the constraint, which is within its limits. Rules in GBNF are refused: what they cost
    the library is known only when it has computed it.
    """
    if sampling.json_schema:
        return _Writer(json.loads(sampling.json_schema), place).grammar()
    name = sampling.constraint
    if sampling.choice:
        return f"root ::= {_one_of(set(sampling.choice), name)}\n"
    if sampling.regex:
        try:
            part = pattern_grammar(sampling.regex, is_json=False)
        except BadPattern as error:
            raise _refused(name, f"{error}") from None
        _check_width(part.width, name)
        return f"root ::= {part.text}\n"
    raise _refused(name, "rules in GBNF")


def _refused(place: str, problem: str) -> BadSchema:
    advice = "the backend openvino_genai cannot hold it; serve the model with the backend llama_cpp"
    return BadSchema(place, f"{problem}: {advice}")


def _check_width(width: int, place: str) -> None:
    if width > MAX_WIDTH:
        raise _refused(place, f"more than {MAX_WIDTH} counted characters and optional parts")


class _Writer:
    """Writes the rules of one schema. Methods return an expression that can stand in a sequence."""

    def __init__(self, root: Any, place: Place) -> None:
        self._root = root
        self._place = place
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        """Expression -> name of its rule."""
        self._references: dict[str, str] = {}
        """Reference -> name of its rule."""
        self._width = 0
        self._copies = 0
        self._steps = 0

    def grammar(self) -> str:
        root = self._value(self._root, (), frozenset())
        return "".join(f"{name} ::= {text}\n" for name, text in {"root": root, **self._rules}.items()) + _BASE

    def _bad(self, path: Path, problem: str) -> BadSchema:
        return BadSchema(self._place(path), problem)

    def _refuse(self, path: Path, problem: str) -> BadSchema:
        return _refused(self._place(path), problem)

    def _step(self, path: Path) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS or len(path) > 4 * MAX_DEPTH:
            raise self._refuse(path, f"subschemas nested more than {MAX_DEPTH} deep, or too many through references")

    def _rule(self, text: str, width: int = 0, path: Path = ()) -> str:
        """Return the name of a rule with this expression."""
        if text not in self._names:
            if len(self._rules) >= MAX_RULES:
                raise self._refuse((), f"a schema that needs more than {MAX_RULES:,} rules")
            self._width += width
            _check_width(self._width, self._place(path))
            name = self._names[text] = f"r{len(self._rules)}"
            self._rules[name] = text
        return self._names[text]

    def _count_copies(self, copies: int, path: Path) -> None:
        self._copies += copies
        if self._copies > MAX_COPIES:
            raise self._refuse(path, f"more than {MAX_COPIES:,} counted items and blocks of 16 characters")

    def _value(self, schema: Any, path: Path, opened: frozenset[str]) -> str:
        """`opened` are the references on the way here without a character between: one of them again has no end."""
        self._step(path)
        if schema is True:
            return "any"
        if schema is False:
            raise self._bad(path, "no JSON fits it")
        if not isinstance(schema, dict):
            raise self._bad(path, f"expected a schema, got {str(schema)[:40]!r}")
        rest = {key: value for key, value in schema.items() if key in _HELD or key in _REFUSED}
        for key in rest.keys() & _REFUSED:
            raise self._refuse((*path, key), f"the keyword {key}")
        for key in _COMBINED & rest.keys():
            if len(rest) > 1:
                beside = ", ".join(sorted(rest.keys() - {key}))
                raise self._refuse((*path, key), f"{key} beside {beside[:80]}")
            if key == "$ref":
                return self._reference(rest[key], path, opened)
            return self._alternatives(key, rest[key], path, opened)
        if "const" in rest or "enum" in rest:
            return self._constants(rest, path)
        if "type" not in rest and not rest:
            return "any"
        texts = [getattr(self, f"_{name}")(rest, path) for name in self._types(rest, path)]
        return _choice(texts)

    def _types(self, schema: Mapping[str, Any], path: Path) -> list[str]:
        """Return the types that are written: without `type`, those that the keywords are for."""
        names = schema.get("type", [])
        names = names if isinstance(names, list) else [names]
        if not set(map(str, names)) <= _KEYWORDS.keys():
            raise self._bad((*path, "type"), f"expected types of JSON, got {str(names)[:80]}")
        if not names and "type" not in schema:
            names = [name for name, keywords in _KEYWORDS.items() if keywords & schema.keys() and name != "integer"]
        if not names:
            raise self._bad((*path, "type"), "no JSON fits it")
        return list(dict.fromkeys(names))

    def _resolved(self, schema: Any, path: Path) -> Any:
        """Return the schema to which references without keywords beside them lead."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or schema.keys() & (_HELD | _REFUSED) != {"$ref"}:
                return schema
            schema = self._target(schema["$ref"], path)
        raise self._bad((*path, "$ref"), "the reference leads only to itself, and never to a schema")

    def _target(self, reference: Any, path: Path) -> Any:
        where = (*path, "$ref")
        self._step(path)
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise self._bad(where, f"expected a reference into this schema (#/...), got {str(reference)[:80]!r}")
        target: Any = self._root
        for part in reference[2:].split("/") if len(reference) > 1 else ():
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = target[int(part)] if part.isdecimal() and int(part) < len(target) else None
            else:
                target = target.get(part) if isinstance(target, dict) else None
        if not isinstance(target, dict | bool):
            raise self._bad(where, f"this schema has nothing at {reference[:80]!r}")
        return target

    def _reference(self, reference: Any, path: Path, opened: frozenset[str]) -> str:
        target = self._target(reference, path)
        if reference in opened:
            raise self._bad((*path, "$ref"), "the reference leads only to itself, and never to a schema")
        if reference not in self._references:
            name = self._references[reference] = f"d{len(self._references)}"
            where = tuple(reference[2:].split("/")) if len(reference) > 1 else ()
            self._rules[name] = self._value(target, where, opened | {reference})
        return self._references[reference]

    def _alternatives(self, key: str, items: Any, path: Path, opened: frozenset[str]) -> str:
        if not isinstance(items, list) or not items:
            raise self._bad((*path, key), "expected a list of schemas")
        if key == "allOf" and len(items) > 1:
            raise self._refuse((*path, key), "allOf of several schemas")
        parts = [(item, (*path, key, index)) for index, item in enumerate(items)]
        if key == "oneOf":
            parts = self._exclusive([(self._resolved(item, where), where) for item, where in parts], (*path, key))
        texts = [self._value(item, where, opened) for item, where in parts if item is not False]
        if not texts:
            raise self._bad((*path, key), "no JSON fits it")
        return _choice(texts)

    def _exclusive(self, parts: list[tuple[Any, Path]], path: Path) -> list[tuple[Any, Path]]:
        """Return the alternatives of a oneOf so that what is written for one fits no other."""
        schemas = [part for part, _ in parts]
        if all(isinstance(part, dict) and isinstance(part.get("properties"), dict) for part in schemas):
            # A property that tells them apart is always written.
            for name in schemas[0]["properties"]:
                values = [_values(part["properties"].get(name)) for part in schemas]
                if None not in values and all(
                    not _have_same(one or [], other or []) for one, other in itertools.combinations(values, 2)
                ):
                    return [({**part, "required": [*part.get("required", []), name]}, where) for part, where in parts]
        for one, other in itertools.permutations(schemas, 2):
            if not _are_apart(one, other):
                raise self._refuse(path, "oneOf with alternatives that may both fit")
        return parts

    def _constants(self, schema: Mapping[str, Any], path: Path) -> str:
        key = "const" if "const" in schema else "enum"
        values = [schema["const"]] if key == "const" else schema["enum"]
        if not isinstance(values, list):
            raise self._bad((*path, key), "expected a list of values")
        if key == "const" and "enum" in schema:
            values = [value for value in values if _have_same([value], schema["enum"])]
        if "type" in schema:
            types = set(self._types(schema, path))
            values = [value for value in values if types & types_of(value)]
        for other in schema.keys() - {"const", "enum", "type"}:
            applies = {name for name, keywords in _KEYWORDS.items() if other in keywords}
            if any(applies & types_of(value) for value in values):
                raise self._refuse((*path, other), f"{other} beside {key}")
        if not values:
            raise self._bad((*path, key), "no JSON fits it")
        return _one_of({_json(value) for value in values}, self._place((*path, key)))

    def _boolean(self, schema: Mapping[str, Any], path: Path) -> str:
        return '("true" | "false")'

    def _null(self, schema: Mapping[str, Any], path: Path) -> str:
        return '"null"'

    def _string(self, schema: Mapping[str, Any], path: Path) -> str:
        least, most = self._counts(schema, path, "minLength", "maxLength")
        pattern, form = schema.get("pattern"), schema.get("format")
        if form in _REFUSED_FORMATS:
            raise self._refuse((*path, "format"), f"the format {form}")
        if form in _FORMATS:
            if pattern is not None:
                raise self._refuse((*path, "format"), "format beside pattern")
            pattern = _FORMATS[form]
        if pattern is None:
            if (least, most) == (0, None):
                return "string"
            if least > MAX_WIDTH:
                raise self._refuse((*path, "minLength"), f"minLength above {MAX_WIDTH}")
            text = f'"\\"" {_counted(least, most)} "\\""'
            if most is not None and text not in self._names:
                self._count_copies((most - least) // 16, (*path, "maxLength"))
            return self._rule(text, least if least > 1 else 0, (*path, "minLength"))
        key = "format" if form in _FORMATS else "pattern"
        if not isinstance(pattern, str):
            raise self._bad((*path, key), f"expected a regular expression, got {str(pattern)[:40]!r}")
        try:
            part = pattern_grammar(pattern, is_json=True)
        except BadPattern as error:
            raise self._refuse((*path, key), f"{key} {pattern[:80]!r}: {error}") from None
        if form == "uri" and most is None:
            part = part._replace(text=f'{part.text} ("/" {_PATH}*)?', most=None)
        elif form == "uri" and part.most is not None and most is not None and part.most < most:
            room = min(most - part.most - 1, _MAX_PATH)
            self._count_copies(room, (*path, "maxLength"))
            part = part._replace(text=f'{part.text} ("/" path{{0,{room}}})?')
        if part.least < least:
            raise self._refuse((*path, "minLength"), f"minLength beside a {key} of shorter texts")
        if most is not None and (part.most is None or part.most > most):
            raise self._refuse((*path, "maxLength"), f"maxLength beside a {key} of longer texts")
        return self._rule(f'"\\"" {part.text} "\\""', part.width, (*path, key))

    def _integer(self, schema: Mapping[str, Any], path: Path) -> str:
        return self._numeric(schema, path, is_integer=True)

    def _number(self, schema: Mapping[str, Any], path: Path) -> str:
        return self._numeric(schema, path, is_integer=False)

    def _numeric(self, schema: Mapping[str, Any], path: Path, *, is_integer: bool) -> str:
        limits = {}
        for key in _KEYWORDS["number"] & schema.keys():
            if isinstance(schema[key], bool) or not isinstance(schema[key], int | float):
                raise self._bad((*path, key), f"expected a number, got {str(schema[key])[:40]!r}")
            limits[key] = Decimal(str(schema[key]))
            if abs(limits[key]) >= 10**_MAX_DIGITS and not (is_integer and isinstance(schema[key], int)):
                raise self._refuse((*path, key), f"{key} of more than {_MAX_DIGITS} digits")
        step = limits.pop("multipleOf", None)
        if step is not None and step != int(step):
            raise self._refuse((*path, "multipleOf"), "multipleOf of a fraction")
        if step is not None and step <= 0:
            raise self._bad((*path, "multipleOf"), "expected a number above 0")
        is_integer |= step is not None
        if not limits and step in (None, 1):
            return "integer" if is_integer else "number"
        places = 0
        if not is_integer:
            places = max(-int(limit.normalize().as_tuple().exponent) for limit in limits.values())
            whole = max(len(str(abs(int(limit)))) for limit in limits.values())
            places = max(places, min(_MAX_FRACTION, _MAX_DIGITS - whole), 0)
            if places + whole > _MAX_DIGITS:
                key = max(limits, key=lambda name: len(str(limits[name])))
                raise self._refuse((*path, key), f"{key} of more than {_MAX_DIGITS} digits")
        unit = 10**places
        furthest = 10 ** max(_MAX_DIGITS - places, 1) * unit
        furthest = max([furthest, *(int(abs(limit)) * unit * 10 for limit in limits.values())]) - 1
        least, most = -furthest, furthest
        for key, limit in limits.items():
            scaled = limit * unit
            if key == "minimum":
                least = max(least, math.ceil(scaled))
            elif key == "exclusiveMinimum":
                least = max(least, math.floor(scaled) + 1)
            elif key == "maximum":
                most = min(most, math.floor(scaled))
            else:
                most = min(most, math.ceil(scaled) - 1)
        if step is not None and step != 1:
            return self._multiples(int(step), limits, least, most, path)
        if least > most:
            raise self._bad((*path, next(iter(limits))), "no number fits its limits")
        parts = []
        if most >= 0:
            parts.append(_between(max(least, 0), most, places))
        if least < 0:
            parts.append(f'"-" {_between(max(-most, 1), -least, places)}')
        return self._rule(_choice(parts))

    def _multiples(self, step: int, limits: Mapping[str, Any], least: int, most: int, path: Path) -> str:
        where = (*path, "multipleOf")
        first = -(-least // step) * step
        if (most - first) // step >= _MAX_VALUES:
            raise self._refuse(where, f"multipleOf without limits, of at most {_MAX_VALUES:,} numbers, beside it")
        if first > most:
            raise self._bad(where, "no number fits it and the limits beside it")
        return _one_of({str(number) for number in range(first, most + 1, step)}, self._place(where))

    def _array(self, schema: Mapping[str, Any], path: Path) -> str:
        least, most = self._counts(schema, path, "minItems", "maxItems")
        first = schema.get("prefixItems", [])
        others = schema.get("items", True)
        if not isinstance(first, list) or isinstance(others, list):
            key = "items" if isinstance(others, list) else "prefixItems"
            raise self._bad((*path, key), "expected the schemas of JSON Schema 2020-12")
        if False in first:
            first, others = first[: first.index(False)], False
        fixed: list[str] = [self._rule(self._value(item, (*path, "prefixItems", index), frozenset()))
                            for index, item in enumerate(first)]  # fmt: skip
        if others is False:
            most = min(len(fixed), len(fixed) if most is None else most)
        if most is not None and least > most:
            raise self._bad((*path, "minItems"), "no array has so many and not more")
        if most == 0:
            return '"[]"'
        other = "" if others is False else self._rule(self._value(others, (*path, "items"), frozenset()))
        fixed = (fixed or [other])[:most]
        rest = ""
        if other and (most is None or most > len(fixed)):
            more = None if most is None else most - len(fixed)
            self._count_copies(more or least, (*path, "items"))
            rest = repeated(f'("," {other})', max(least - len(fixed), 0), more)
        for index, item in reversed(list(enumerate(fixed))):
            comma = '"," ' if index else ""
            rest = f"{comma}{item} {rest}"
            if index >= least:
                rest = self._rule(f"({rest})?")
        return f'"[" {rest} "]"'

    def _object(self, schema: Mapping[str, Any], path: Path) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", "properties" not in schema)
        if not isinstance(properties, dict) or not isinstance(required, list):
            key = "required" if isinstance(properties, dict) else "properties"
            raise self._bad((*path, key), "expected " + ("names" if key == "required" else "schemas by name"))
        missing = dict.fromkeys(required, others if "additionalProperties" in schema else True)
        properties = {**properties, **{name: value for name, value in missing.items() if name not in properties}}
        properties = {name: value for name, value in properties.items() if value is not False or name in required}
        least, most = self._counts(schema, path, "minProperties", "maxProperties")
        for key in ("minProperties", "maxProperties"):
            # Names that are free may be written twice, and then count once.
            if key in schema and (properties or (key == "minProperties" and least > 1)):
                raise self._refuse((*path, key), f"{key} of names that are not all free or all required")
        other = ""
        if others is not False:
            value = self._rule(self._value(others, (*path, "additionalProperties"), frozenset()))
            name = f'"\\"" {_other_name(properties)} "\\""' if properties else "string"
            other = self._rule(f'{name} ":" {value}')
        if not properties:
            if not other or most == 0:
                return '"{}"'
            another = f'("," {other})'
            self._count_copies(most or 0, (*path, "maxProperties"))
            members = f"{other} {repeated(another, 0, None if most is None else most - 1)}"
            return f'"{{" {members} "}}"' if least else f'"{{" ({members})? "}}"'
        # What may stand from a property on: as the first members of the object, and after others.
        first = self._rule(f'({other} ("," {other})*)?' if other else '""')
        later = self._rule(f'("," {other})*' if other else '""')
        for name, value in reversed(properties.items()):
            text = self._value(value, (*path, "properties", name), frozenset())
            member = self._rule(f"{literal(_json(name) + ':')} {text}")
            without_first, without_later = ("", "") if name in required else (f" | {first}", f" | {later}")
            first = self._rule(f"{member} {later}{without_first}")
            later = self._rule(f'"," {member} {later}{without_later}')
        return f'"{{" {first} "}}"'

    def _counts(self, schema: Mapping[str, Any], path: Path, least_key: str, most_key: str) -> tuple[int, int | None]:
        counts: list[int | None] = []
        for key, default in ((least_key, 0), (most_key, None)):
            value = schema.get(key, default)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0
                                      or value != int(value)):  # fmt: skip
                raise self._bad((*path, key), f"expected a whole number, got {str(value)[:40]!r}")
            largest = MAX_LENGTH if key.endswith("Length") else MAX_ITEMS
            if value is not None and value > largest:
                raise self._refuse((*path, key), f"{key} above {largest:,}")
            counts.append(None if value is None else int(value))
        least, most = counts
        if most is not None and (least or 0) > most:
            raise self._bad((*path, least_key), f"expected at most {most_key} {most}, got {least}")
        return least or 0, most


def _counted(least: int, most: int | None) -> str:
    """Return an expression for so many characters of a string.

    For each counted character of a rule the library computes which tokens may follow, once a grammar, in a step. The
    rules `sixteen` and `part` are computed once for all strings; `plain` costs nothing then, but 30 ms of each token.
    The library would write rules without names of others out wherever they are named. With these rules it sometimes
    ends a text too early, so the fewest characters are counted without them.
    """
    parts = [f"{_CHARACTER}{{{least}}}"] if least else []
    if most is None:
        return " ".join([*parts, f"{_CHARACTER}*"])
    sixteens, rest = divmod(most - least, 16)
    last = [f"plain{{0,{rest}}}"] if rest else []
    if sixteens:
        last = [f"(sixteen{{0,{sixteens - 1}}} part | {' '.join([f'sixteen{{{sixteens}}}', *last])})"]
    return " ".join([*parts, *last])


def _choice(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({' | '.join(dict.fromkeys(parts))})"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _have_same(some: Iterable[object], others: Iterable[object]) -> bool:
    return any(_is_same(one, other) for one, other in itertools.product(some, others))


def _values(schema: Any) -> list[Any] | None:
    """Return the values of a const or enum."""
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _are_apart(one: Any, other: Any) -> bool:
    """Return whether no JSON that is written for `one` fits `other`."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values = [_values(part) for part in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not _have_same(values[0], values[1])
    types = []
    for part, found in zip((one, other), values, strict=True):
        names = part.get("type", list(_KEYWORDS))
        known = set(names if isinstance(names, list) else [names])
        if found is not None:
            known &= set().union(*map(types_of, found))
        types.append(known | ({"integer"} if "number" in known else set()))
    return not types[0] & types[1]


def _one_of(texts: set[str], place: str, depth: int = 0) -> str:
    """Return an expression for these texts, in which no two alternatives begin with the same character.

    xgrammar (of OpenVINO GenAI 2026.4) takes `"a1x" | "a2x" | "a10x"` for more texts than these, in its own conversion
    of `enum` too.
    """
    if depth > _MAX_BRANCHES:
        raise _refused(place, f"a text with more than {_MAX_BRANCHES} places where others go on differently")
    parts = []
    for first, group in itertools.groupby(sorted(texts), lambda text: text[:1]):
        items = list(group)
        pairs = enumerate(zip(items[0], items[-1], strict=False))
        prefix = items[0][: next((index for index, (one, other) in pairs if one != other), len(items[0]))]
        rests = {item[len(prefix) :] for item in items}
        if not first:
            parts.append('""')
        elif rests == {""}:
            parts.append(literal(prefix))
        else:
            parts.append(f"{literal(prefix)} {_one_of(rests, place, depth + 1)}")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _other_name(names: Iterable[str]) -> str:
    """Return an expression for the inside of a JSON string that is none of these names."""
    names = set(names)
    # Those with a character that JSON escapes cannot be written anyway.
    firsts = sorted({name[0] for name in names if name and json.dumps(name[0], ensure_ascii=False)[1:-1] == name[0]})
    parts = [f"{character_class(without(_PLAIN, [(ord(first), ord(first)) for first in firsts]))} {_CHARACTER}*"]
    parts += [f"{literal(first)} {_other_name(name[1:] for name in names if name[:1] == first)}" for first in firsts]
    return f"({' | '.join(parts)}){'' if '' in names else '?'}"


def _between(least: int, most: int, places: int) -> str:
    """Return an expression for the numbers from `least` to `most`, in units of the last of `places` decimals."""
    unit = 10**places
    parts: list[str] = []
    low, high = least // unit, most // unit
    for start, end in dict.fromkeys(((low, low), (low + 1, high - 1), (high, high))):
        if start > end:
            continue
        fraction = (least % unit if start == low else 0, most % unit if end == high else unit - 1)
        whole = _integers(start, end)
        if not places:
            parts.append(whole)
            continue
        digits = _fraction(f"{fraction[0]:0{places}}", f"{fraction[1]:0{places}}")
        if digits and fraction[0]:
            parts.append(f'{whole} "." {digits}')
        else:
            parts.append(f'{whole} ("." {digits})?' if digits else whole)
    return _choice(parts)


def _integers(least: int, most: int) -> str:
    """Return an expression for the integers from `least` to `most`, of at least 0."""
    parts = []
    for count in range(len(str(least)), len(str(most)) + 1):
        low, high = max(least, 10 ** (count - 1) if count > 1 else 0), min(most, 10**count - 1)
        parts.append(_digits(str(low), str(high), is_whole=True))
    return _choice(parts)


def _fraction(least: str, most: str) -> str:
    """Return an expression for decimals, at least one, from `least` to `most`, which have the most digits of them.

    "" if the only such text is none.
    """
    return _digits(least, most, is_whole=False)


def _digits(least: str, most: str, *, is_whole: bool) -> str:
    """Return an expression for the digits from `least` to `most`: as many as these have, or fewer of a fraction."""
    count = len(least)
    if not count:
        return ""
    if least == "0" * count and most == "9" * count:
        return "[0-9]" if count == 1 else f"[0-9]{{{count if is_whole else 1},{count}}}"
    parts = []
    first, last = int(least[0]), int(most[0])
    steps = [(first, first, least[1:], most[1:])] if first == last else [
        (first, first, least[1:], "9" * (count - 1)),
        (first + 1, last - 1, "0" * (count - 1), "9" * (count - 1)),
        (last, last, "0" * (count - 1), most[1:]),
    ]  # fmt: skip
    for low, high, rest_least, rest_most in steps:
        if low > high:
            continue
        digit = f"[{low}-{high}]" if high > low else f'"{low}"'
        rest = _digits(rest_least, rest_most, is_whole=is_whole)
        if rest and not is_whole and rest_least == "0" * (count - 1):
            rest = f"({rest})?"
        parts.append(f"{digit} {rest}" if rest else digit)
    return _choice(parts)
