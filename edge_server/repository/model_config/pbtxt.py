"""Parser and writer for config.pbtxt and Triton's JSON form: text to and from an inference.ModelConfig message.

Only syntax and schema are checked here; `validate_config` checks the values. Messages are typed Any (`ConfigMessage`):
their classes are made at run time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from edge_server.config import nearest
from edge_server.errors import BadModelConfig
from edge_server.protocol import messages

if TYPE_CHECKING:
    from google.protobuf import text_format

ConfigMessage: TypeAlias = Any
"""An inference.ModelConfig, or a message inside one."""

MAX_CONFIG_BYTES = 4 << 20

_MAX_MESSAGE_CHARS = 1000
"""Most characters of the parser's message in an error, enough for the whole wrong line or value."""

_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w{1,100})"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named (\w{1,100})')
_LAST_NUMBER = re.compile(rb"(?<![\d-])-?\d+$")
"""Messages of protobuf's parsers for a name that the schema does not have."""


def new_config() -> ConfigMessage:
    """Return an empty configuration."""
    return messages.message_class("inference.ModelConfig")()


def dtype_name(number: int) -> str:
    """Return the config.pbtxt name of a number of inference.DataType."""
    names = messages.message_class("inference.ModelConfig").DESCRIPTOR.file.enum_types_by_name["DataType"]
    return str(names.values_by_number[number].name)


def parse_text(content: bytes, model: str, source: str = "config.pbtxt") -> ConfigMessage:
    """Parse protobuf text format. `source` names the file in errors.

    Raises BadModelConfig with line and column for a syntax error, an unknown field, or a value of the wrong type.
    """
    from google.protobuf import text_format

    _check_size(len(content), model, source)
    config = new_config()
    try:
        text_format.Parse(content.decode("utf-8-sig"), config, descriptor_pool=config.DESCRIPTOR.file.pool)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadModelConfig(f"model '{model}': {source} line {line} is not UTF-8 text") from error
    except text_format.ParseError as error:
        raise BadModelConfig(f"model '{model}': {source} {_with_spelling(_located(error), error, config)}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        # The parser gives no position for an enum number above 32 bits.
        # Python 3.11.2, which Debian 12 has, gives no text with the ValueError for thousands of digits.
        reason = str(error) or "a number has too many digits"
        raise BadModelConfig(f"model '{model}': {source}{_line_of_number(error, content)}: {reason}") from error
    _check_enums(config, model, source)
    return config


def read_file(path: Path, model: str) -> ConfigMessage:
    """Read and parse a configuration file. Raises BadModelConfig, also if the file cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise BadModelConfig(f"model '{model}': '{path}' cannot be read: {error.strerror}") from error
    return parse_text(content, model, path.name)


def _located(error: text_format.ParseError) -> str:
    line, column = error.GetLine(), error.GetColumn()
    text = str(error)
    if line is None:
        return _brief(text)
    # The message is the whole line in quotes, and then the error.
    quoted, mark, message = text.removeprefix(f"{line}:{column} : ").rpartition("': ")
    return f"line {line} column {column}: {_brief(quoted)}{mark}{_brief(message)}"


def _with_spelling(message: str, error: Exception, config: ConfigMessage) -> str:
    """Return the parser's message, with the nearest spelling of an unknown field or enum value."""
    pool = config.DESCRIPTOR.file.pool
    spelling = ""
    if found := _UNKNOWN_FIELD.search(str(error)):
        spelling = nearest(found[2], pool.FindMessageTypeByName(found[1]).fields_by_name)
    elif found := _UNKNOWN_VALUE.search(str(error)):
        spelling = nearest(found[2], pool.FindEnumTypeByName(found[1]).values_by_name)
    return message.rstrip(".") + spelling if spelling else message


def _line_of_number(error: Exception, content: bytes) -> str:
    """Return " line N" for the first line with the number that the error quotes, "" when there is none."""
    number = _LAST_NUMBER.search(str(error).encode())
    found = None if number is None else re.search(rb"(?<![\w.])" + number[0] + rb"(?![\w.])", content)
    if found is None:
        return ""
    line = content.count(b"\n", 0, found.start()) + 1
    return f" line {line}"


def _brief(text: str) -> str:
    """Return the parser's message; the middle of a very long one is cut out."""
    if len(text) <= _MAX_MESSAGE_CHARS:
        return text
    return f"{text[: _MAX_MESSAGE_CHARS // 2]} ... {text[-_MAX_MESSAGE_CHARS // 2 :]}"


def parse_json(text: str, model: str, source: str = "the configuration given as JSON") -> ConfigMessage:
    """Parse proto JSON as Triton does. Enum names may have any case, and numbers may be strings.

    Raises BadModelConfig, also for an unknown field.
    """
    from google.protobuf import json_format

    _check_size(len(text), model, source)
    config = new_config()
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
        # A JSON escape can produce half of a surrogate pair, with which the parser's lookup of names fails.
        json.dumps(document, ensure_ascii=False).encode()
        if not isinstance(document, dict):
            raise BadModelConfig(f"model '{model}': {source}: expected an object, given {type(document).__name__}")
        json_format.ParseDict(_fold_enums(document, config.DESCRIPTOR), config)
    except (ValueError, OverflowError, RecursionError, json_format.ParseError) as error:
        message = _with_spelling(_brief(str(error)), error, config)
        raise BadModelConfig(f"model '{model}': {source}: {message}") from error
    _check_enums(config, model, source)
    return config


def write_json(config: ConfigMessage) -> str:
    """Return Triton's JSON form: proto field names, unset fields printed, 64-bit integers as numbers."""
    from google.protobuf import json_format

    document = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(_as_numbers(document, config.DESCRIPTOR), separators=(",", ":"), ensure_ascii=False)


def _check_enums(message: ConfigMessage, model: str, source: str) -> None:
    """Reject enum numbers without a name, which proto3 accepts."""
    for field, value in message.ListFields():
        entry = _map_value(field)
        values = value.values() if entry is not None else value if _is_sequence(value) else (value,)
        kind = (entry or field).enum_type
        for item in values:
            if kind is not None and item not in kind.values_by_number:
                raise BadModelConfig(f"model '{model}': {source}: {field.name}: {item} is not a {kind.full_name}")
            if (entry or field).message_type is not None:
                _check_enums(item, model, source)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__getitem__") and not isinstance(value, (str, bytes))


def _check_size(size: int, model: str, source: str) -> None:
    if size > MAX_CONFIG_BYTES:
        raise BadModelConfig(f"model '{model}': {source} has {size} bytes; expected at most {MAX_CONFIG_BYTES}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        found[key] = value
    return found


def _map_value(field: Any) -> Any:
    """Return the value field of a map field, None for other fields."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return None
    return entry.fields_by_name["value"]


def _fold_enums(document: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """Return `document` with the enum names of its fields in upper case, as the schema writes them all."""
    folded = dict(document)
    for key, value in document.items():
        field = descriptor.fields_by_name.get(key) or descriptor.fields_by_camelcase_name.get(key)
        if field is not None:
            folded[key] = _fold_value(value, field)
    return folded


def _fold_value(value: Any, field: Any) -> Any:
    if isinstance(value, list):
        return [item if isinstance(item, list) else _fold_value(item, field) for item in value]
    if isinstance(value, str) and field.enum_type is not None:
        return value.upper() if value.upper() in field.enum_type.values_by_name else value
    if field.enum_type is not None and (isinstance(value, bool) or (isinstance(value, float) and value % 1 != 0)):
        # The parser would round it, and accept true as 1.
        raise ValueError(f"{field.name}: expected a name or a number of {field.enum_type.full_name}, given {value}")
    if not isinstance(value, dict) or field.message_type is None:
        return value
    entry = _map_value(field)
    if entry is not None:
        return {key: _fold_value(item, entry) for key, item in value.items()}
    return _fold_enums(value, field.message_type)


def _as_numbers(document: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    return {key: _as_number(value, descriptor.fields_by_name[key]) for key, value in document.items()}


def _as_number(value: Any, field: Any) -> Any:
    if isinstance(value, list):
        return [_as_number(item, field) for item in value]
    if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
        return int(value)
    if not isinstance(value, dict):
        return value
    entry = _map_value(field)
    if entry is not None:
        return {key: _as_number(item, entry) for key, item in value.items()}
    return _as_numbers(value, field.message_type)
