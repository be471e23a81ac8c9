"""Large JSON arrays: parsed in pieces with the result of the whole, and with little memory."""

from __future__ import annotations

import json
import random
import tracemalloc

import numpy as np
import pytest

from edge_server.core.tensor import DType
from edge_server.errors import InvalidRequest
from edge_server.frontends import json_number_arrays, json_text
from edge_server.frontends.json_number_arrays import ArrayText, cut_out
from edge_server.frontends.json_text import format_numbers, parse_json, parse_numbers
from edge_server.frontends.v2.infer_body_codec import decode_infer
from edge_server.frontends.v2.json_tensor_data import tensor_from_json


def body(data: bytes, count: int, datatype: str = "FP32", more: bytes = b"") -> bytes:
    return b'{"inputs":[{"name":"IN","datatype":"%s","shape":[%d],"data":%b}]%b}' % (
        datatype.encode(), count, data, more,
    )  # fmt: skip


def decoded(text: bytes, make_spec, datatype: str = "FP32") -> np.ndarray:
    spec = make_spec("m", DType(datatype))
    request = decode_infer(memoryview(text), None, spec, None).request  # type: ignore[arg-type]
    return request.inputs["IN"].array


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_number_arrays, "_PIECE_BYTES", 1024)


def nested(values: list[object], rng: random.Random, *widths: int) -> list[object]:
    for width in widths:
        values = [values[start : start + width] for start in range(0, len(values), width)]
    return values


@pytest.mark.sample
@pytest.mark.parametrize("widths", [(), (7,), (3, 50), (1,), (20_000,)])
@pytest.mark.parametrize("indent", [None, 1])
def test_any_nesting_and_white_space_comes_to_the_same_tensor(make_spec, small_pieces, widths, indent):
    rng = random.Random(len(widths))
    values = [rng.choice([rng.uniform(-1e6, 1e6), rng.randrange(99), -0.0, 1e-30]) for _ in range(20_000)]
    text = json.dumps(nested(values, rng, *widths), indent=indent).encode()
    _, arrays = cut_out(body(text, 20_000))
    assert len(arrays) == 1, "the short way would prove nothing here"
    made = decoded(body(text, 20_000), make_spec)
    assert made.tobytes() == np.array(values).astype(np.float32).tobytes()
    as_usual = tensor_from_json("IN", DType.FP32, [20_000], json.loads(text), model="m").array
    assert made.tobytes() == as_usual.tobytes()


@pytest.mark.parametrize(
    ("datatype", "element", "value"),
    [
        ("BOOL", "true", True),
        ("INT8", "-128", -128),
        ("UINT8", "255", 255),
        ("INT64", str(-(2**63)), -(2**63)),
        ("UINT64", str(2**64 - 1), 2**64 - 1),
        ("FP64", "1e308", 1e308),
        ("FP32", "Infinity", float("inf")),
    ],
)
def test_every_type_of_number_is_read_and_checked(make_spec, datatype, element, value):
    count = 30_000
    text = ("[" + ", ".join([element] * count) + "]").encode()
    made = decoded(body(text, count, datatype), make_spec, datatype)
    assert made.dtype == DType(datatype).numpy
    assert set(made.tolist()) == {value}
    wrong = "null" if datatype in ("FP32", "FP64", "BOOL") else "256.5" if datatype != "UINT64" else str(2**64)
    broken = text.replace(element.encode(), wrong.encode(), 20_000).replace(wrong.encode(), element.encode(), 19_999)
    with pytest.raises(InvalidRequest, match="'data' of input 'IN' for model 'm'"):
        decoded(body(broken, count, datatype), make_spec, datatype)


NUMBERS = b",".join([b"1"] * 40_000)


@pytest.mark.parametrize(
    "data",
    [
        b"[" + NUMBERS + b",]",
        b"[," + NUMBERS + b"]",
        b"[" + NUMBERS.replace(b"1,1", b"1,,1", 1) + b"]",
        b"[" + NUMBERS + b"]]",
        b"[[" + NUMBERS + b"]",
        b"[" + NUMBERS + b"][" + NUMBERS + b"]",
        b"[" + NUMBERS + b"],[" + NUMBERS + b"]",
        b"[" + NUMBERS + b" 1]",
        b"[" + NUMBERS + b",01]",
        b"[" + NUMBERS + b",+1]",
        b"[" + NUMBERS + b",1.]",
        b"[" + NUMBERS + b",tru]",
        b"[" + NUMBERS + b",[1]]",
        b"[[1]," + NUMBERS + b"]",
        b"[" + b"[" * 150 + NUMBERS + b"]" * 150 + b"]",
        b"[" + b"1" * 300_000 + b"]",
        b"[" + b"[" * 100_000 + b"]" * 100_000 + b"]",
    ],
)
def test_a_malformed_array_of_numbers_is_refused_wherever_the_error_is(make_spec, small_pieces, data):
    with pytest.raises(InvalidRequest):
        decoded(body(data, 40_000), make_spec)


def parsed(text: bytes) -> list[object]:
    return [parse_json(piece) for piece in ArrayText(memoryview(text)).pieces()]


def test_no_cut_hides_a_missing_value(small_pieces):
    # Wherever the pieces end, one comma too many is seen.
    numbers = NUMBERS[:4001]
    for place in range(0, 4001, 2):
        text = b"[" + numbers[:place] + b"," + numbers[place:] + b"]"
        with pytest.raises(InvalidRequest, match="failed to parse the request JSON buffer"):
            parsed(text)
    sizes = [len(piece) for piece in parsed(b"[" + numbers + b"]")]  # type: ignore[arg-type]
    assert len(sizes) > 3
    assert sum(sizes) == 2001


def test_a_comma_before_much_white_space_may_not_be_the_last(make_spec, small_pieces):
    for tail, is_right in ((b"1]", True), (b"]", False), (b",1]", False)):
        text = b"[" + NUMBERS + b"," + b" " * 400 + tail
        if is_right:
            assert len(decoded(body(text, 40_001), make_spec)) == 40_001
        else:
            with pytest.raises(InvalidRequest):
                decoded(body(text, 40_001), make_spec)


def test_the_shape_is_compared_before_anything_is_parsed(make_spec, monkeypatch):
    text = b"[" + NUMBERS + b"]"
    monkeypatch.setattr(ArrayText, "pieces", lambda self: pytest.fail("parsed"))
    for count in (39_999, 40_001, 2**40):
        with pytest.raises(InvalidRequest, match=f"expected {count} elements, got 40000"):
            decoded(body(text, count), make_spec)


def test_empty_arrays_among_the_elements_count_as_none(make_spec):
    text = b"[" + b"[],[1,2]," * 20_000 + b"[]]"
    assert decoded(body(text, 40_000), make_spec).tolist() == [1, 2] * 20_000
    for count in (39_999, 40_001, 70_000):
        with pytest.raises(InvalidRequest, match=f"expected {count} elements, got"):
            decoded(body(text, count), make_spec)


def test_arrays_of_next_to_nothing_are_refused_by_their_number(make_spec):
    text = b"[" + b"[]," * (json_number_arrays.MAX_ARRAYS + 1) + b"[0]]"
    with pytest.raises(InvalidRequest, match="in a large 'data' array, more than 1048576 arrays"):
        decoded(body(text, 1), make_spec)


def test_an_array_within_a_string_stays_a_string():
    inner = json.dumps({"data": [1] * 40_000})
    text = json.dumps({"id": inner, "data": [2] * 40_000}).encode()
    # An escaped quote ends the certainty about what is a string: all is parsed as usual.
    assert cut_out(text)[1] == {}
    assert parse_json(text, cuts=True) == {"id": inner, "data": [2] * 40_000}
    text = b'{"id": "x, [1, 2]", "data" : [' + NUMBERS + b"]}"
    value = parse_json(text, cuts=True)
    assert isinstance(value, dict)
    assert value["id"] == "x, [1, 2]"
    assert isinstance(value["data"], ArrayText)


def test_large_arrays_where_none_belong_are_refused_by_name(make_spec):
    for more, said in (
        (b',"parameters":{"data":[%b]}', "invalid value type for 'data' parameter.*, got ArrayText"),
        (b',"outputs":{"data":[%b]}', "Unable to parse 'outputs': expected an array, got an object"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            decoded(body(b"[1]", 1, more=more % NUMBERS), make_spec)
    with pytest.raises(InvalidRequest, match="two members of the same name"):
        decoded(b'{"data":1,"data":[%b]}' % NUMBERS, make_spec)
    with pytest.raises(InvalidRequest, match="FP16 data via JSON is not supported"):
        decoded(body(b"[" + NUMBERS + b"]", 40_000, "FP16"), make_spec, "FP16")


def test_a_body_of_tiny_numbers_costs_a_small_multiple_of_itself(make_spec, small_pieces):
    text = body(b"[" + b"0," * 150_000 + b"0]", 150_001, "UINT8")
    tracemalloc.start()
    try:
        assert len(decoded(text, make_spec, "UINT8")) == 150_001
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The tensor is half as large as the text; a list of its elements would be four times as large as the text.
    assert peak < 2 * len(text)


@pytest.mark.parametrize("element", [b"{}", b"[]", b'""', b'"ab"', b"0.5", b'{"a":0}'])
def test_more_values_than_the_parser_may_be_given_are_refused_before_it_is_asked(monkeypatch, element):
    text = b"[" + (element + b",") * json_text.MAX_VALUES + element + b"]"
    monkeypatch.setattr(json_text, "_DECODER", None)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=f"more than {json_text.MAX_VALUES} values"):
            parse_json(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 * 2**20


def test_commas_within_strings_are_no_values():
    for text in ("," * 3_000_000, 'a "quoted", word\\, ' * 200_000, "[{:," * 800_000):
        assert parse_json(json.dumps({"text": text}).encode()) == {"text": text}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_structure_is_found_however_the_text_is_cut(monkeypatch, size):
    monkeypatch.setattr(json_text, "_CHUNK_BYTES", size)
    text = json.dumps({'a"\\"': ['\\\\"[', "]\\", {"b": [[1, '"']], "c\\": {}}], "": '\\"' * 9 + "}"}).encode()
    found = b"".join(piece.tobytes() for piece in json_text._outside_strings(text))
    assert found == b"{:[,,{:[[,]],:{}}],:}"


@pytest.mark.parametrize(
    "text",
    [
        "[1,2.5,-0,-0.0,1e5,1E-7]", "[true,false,null]", "[[1,2],[3,4]]", "[18446744073709551615,-9223372036854775808]",
        "[NaN,Infinity,-Infinity]", "[1e400]", "[]", " [ 1 ,\t2 ] ",
    ],
)  # fmt: skip
def test_numbers_are_parsed_as_by_the_standard_library(text: str) -> None:
    expected = json.loads(text)
    got = parse_numbers(text.encode())
    assert repr(got) == repr(expected)


@pytest.mark.parametrize("text", ["[1,]", "[01]", "[1.]", "[1 2]", "[1", "1]", "", "[\xff]"])
def test_text_that_is_no_array_of_numbers_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_numbers(text.encode("latin-1"))


@pytest.mark.parametrize("numbers", [[1, -2, 2**64 - 1], [0.1, 1e300, 1e-300, -0.0, 5e-324], []])
def test_numbers_are_written_so_that_they_are_read_again(numbers: list[object]) -> None:
    text = format_numbers(numbers)
    assert json.loads(text) == numbers
    assert "n" not in text
    assert " " not in text


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_text_with_a_number_that_json_lacks_has_the_letter_n(number: float) -> None:
    assert "n" in format_numbers([1.0, number])


@pytest.mark.parametrize(("datatype", "words"), [("INT64", "out of range for INT64"), ("UINT64", "out of range")])
def test_a_large_array_with_an_integer_beyond_64_bits_is_out_of_range(make_spec, datatype, words):
    data = b"[" + b"1," * 40_000 + b"18446744073709551616]"
    with pytest.raises(InvalidRequest, match=words):
        decoded(body(data, 40_001, datatype), make_spec, datatype)


def test_a_large_array_that_is_nested_too_deeply_within_a_piece_is_refused(make_spec):
    data = b"[" + b"1," * 40_000 + b"[" * 150 + b"1" + b"]" * 150 + b"]"
    with pytest.raises(InvalidRequest, match="nested deeper than 100 levels"):
        decoded(body(data, 40_001), make_spec)
