"""Kinds of values: how the text of a flag, variable or TOML key becomes a value, and what it must look like."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edge_server.config.slices import CATEGORIES, RestrictedGroup
from edge_server.config.trace import check_trace_setting


class ConfigError(Exception):
    """The operator's settings cannot be used; the message names the setting and where it was given."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` raises ValueError with what was expected. `toml_types` are those that a TOML file may use for it.

    `may_stand_alone`: as a flag, no value means "true". `is_secret`: errors do not repeat the text.
    """

    metavar: str
    parse: Callable[[str], object]
    toml_types: tuple[type, ...] = (str,)
    may_stand_alone: bool = False
    is_secret: bool = False


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean '...'?` for the nearest spelling, "" when none is near."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else ""


def parse_boolean(text: str) -> bool:
    """Read the words that Triton reads, in any case."""
    word = text.lower()
    if word in ("true", "on", "1"):
        return True
    if word in ("false", "off", "0"):
        return False
    raise ValueError("expected true, false, on, off, 1 or 0")


def _parse_optional_boolean(text: str) -> bool | None:
    return parse_boolean(text) if text else None


def integer(low: int, high: int) -> Kind:
    def parse(text: str) -> int:
        # Digits are counted first: int() takes quadratic time, spaces, underscores and other scripts' digits.
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise ValueError(f"expected an integer of {low} to {high}")
        return int(text)

    return Kind("integer", parse, (int,))


def number(low: float, high: float) -> Kind:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # false for nan
            raise ValueError(f"expected a number of {low:g} to {high:g}")
        return value

    return Kind("number", parse, (int, float))


def _parse_verbosity(text: str) -> int:
    if text.lower() in ("true", "false"):
        return int(text.lower() == "true")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("expected an integer of 0 or more, true or false")
    return int(text)


def _parse_optional_text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected printable characters")
    return text


def _parse_text(text: str) -> str:
    if not text:
        raise ValueError("expected some text")
    return _parse_optional_text(text)


def choice(*words: str) -> Kind:
    """One of `words`, in any case."""
    by_folded = {word.lower(): word for word in words}

    def parse(text: str) -> str:
        if text.lower() not in by_folded:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}{nearest(text, words)}")
        return by_folded[text.lower()]

    return Kind("|".join(words), parse)


def _parse_pattern(text: str) -> re.Pattern[str] | None:
    """Compile a header pattern. Triton's engine (RE2) reads a leading (?-i) as "case matters", Python's does not."""
    if not text:
        return None
    flags = re.IGNORECASE
    if text.startswith("(?-i)"):
        text, flags = text.removeprefix("(?-i)"), re.RegexFlag(0)
    try:
        return re.compile(text, flags)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from error


def _parse_restricted(text: str) -> RestrictedGroup:
    """Read `category,category:key=value`."""
    if not text.isprintable():
        # Also what was no UTF-8 in the environment: it could be compared with no header, and would fail each request.
        raise ValueError("expected printable characters")
    names, colon, pair = text.partition(":")
    key, equals, value = pair.partition("=")
    categories = tuple(name.strip() for name in names.split(","))
    if not (colon and equals and key and value and all(categories)):
        raise ValueError("expected <category>,...:<key>=<value>")
    for name in categories:
        if name not in CATEGORIES:
            raise ValueError(f"unknown category '{name}'{nearest(name, CATEGORIES)} (of {', '.join(CATEGORIES)})")
    return RestrictedGroup(categories, key, value)


def _parse_backend_setting(text: str) -> tuple[str, str, str]:
    """Read `backend,key=value`, or `key=value` for all backends; values may hold commas and equals signs."""
    left, equals, value = text.partition("=")
    backend, comma, key = left.partition(",")
    if not comma:
        backend, key = "", left
    if not equals or not key or not value or (comma and not backend):
        raise ValueError("expected <backend>,<key>=<value>")
    return backend.strip(), key.strip(), value


def _parse_rate_resource(text: str) -> tuple[str, int, int | None]:
    """Read `name:count` or `name:count:device`."""
    name, _, rest = text.partition(":")
    count, colon, device = rest.partition(":")
    numbers = [count, device] if colon else [count]
    if not name or not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers):
        raise ValueError("expected <name>:<count>[:<device>]")
    return name, int(count), int(device) if colon else None


def _parse_gpu_limit(text: str) -> tuple[int, float]:
    """Read Triton's `device:fraction`."""
    device, colon, fraction = text.partition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,3}", device) or not re.fullmatch(r"[01](\.[0-9]{0,9})?", fraction):
        raise ValueError("expected <device>:<fraction>, the fraction from 0 to 1")
    if float(fraction) > 1:
        raise ValueError(f"the fraction of GPU {device} must be from 0 to 1, got {fraction}")
    return int(device), float(fraction)


BOOLEAN = Kind("boolean", parse_boolean, (bool,), may_stand_alone=True)
OPTIONAL_BOOLEAN = Kind("boolean", _parse_optional_boolean, (bool, str), may_stand_alone=True)
VERBOSITY = Kind("integer", _parse_verbosity, (int, bool), may_stand_alone=True)
TEXT = Kind("text", _parse_text)
OPTIONAL_TEXT = Kind("text", _parse_optional_text)
PATH = Kind("path", _parse_text)
OPTIONAL_PATH = Kind("path", _parse_optional_text)
PATTERN = Kind("regex", _parse_pattern)
RESTRICTED = Kind("category,...:key=value", _parse_restricted, is_secret=True)
BACKEND_SETTING = Kind("backend,key=value", _parse_backend_setting)
RATE_RESOURCE = Kind("name:count[:device]", _parse_rate_resource)
GPU_LIMIT = Kind("device:fraction", _parse_gpu_limit)
TRACE_SETTING = Kind("[mode,]setting=value", check_trace_setting)
PORT = integer(0, 65535)
COUNT = integer(0, 2**31 - 1)
