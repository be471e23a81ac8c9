"""Request parameters."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.request_response import SequenceStep
from edge_server.errors import InvalidRequest
from edge_server.frontends.v2.header_forwarding import header_parameters
from edge_server.frontends.v2.parameters import binary_data_size, region_reference, requested_output, split_parameters
from edge_server.frontends.v2.requested_outputs import RegionRef, RequestedOutput
from edge_server.frontends.v2.version_text import parse_version


def test_known_parameters_are_separated_from_custom_ones():
    found = split_parameters(
        {
            "sequence_id": 42,
            "sequence_start": True,
            "sequence_end": False,
            "priority": 2,
            "timeout": 1500,
            "binary_data_output": True,
            "a": "text",
            "b": 1,
            "c": 1.5,
            "d": False,
        }
    )
    assert found.sequence == SequenceStep(42, is_start=True, is_end=False)
    assert (found.priority, found.timeout_us, found.binary_output) == (2, 1500, True)
    assert found.custom == {"a": "text", "b": 1, "c": 1.5, "d": False}


@pytest.mark.parametrize("none", [{}, {"sequence_id": 0}, {"sequence_id": ""}, {"sequence_start": True}])
def test_zero_and_empty_ids_are_no_sequence(none):
    assert split_parameters(none).sequence is None


def test_string_ids_are_sequences_too():
    assert split_parameters({"sequence_id": "cam"}).sequence == SequenceStep("cam")
    assert split_parameters({"sequence_id": 2**64 - 1}).sequence == SequenceStep(2**64 - 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence_id": -1},
        {"sequence_id": 2**64},
        {"sequence_id": 1.0},
        {"sequence_id": True},
        {"sequence_id": "é" * 65},
        {"sequence_start": 1},
        {"priority": -1},
        {"priority": True},
        {"priority": "1"},
        {"timeout": 1.5},
        {"timeout": None},
        {"binary_data_output": 1},
        {"custom": None},
        {"custom": []},
        {"custom": {}},
        {"custom": 2**63},
    ],
)
def test_wrong_types_and_ranges_are_refused_by_name(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        split_parameters(wrong)


@pytest.mark.parametrize("ms", [1, 250.5, 86_400_000])
def test_a_deadline_counts_from_now_and_is_not_the_models_business(ms):
    before_ns = time.monotonic_ns()
    found = split_parameters({"edge_deadline_ms": ms, "timeout": 7})
    assert before_ns <= found.deadline_ns - int(ms * 1e6) <= time.monotonic_ns()
    assert (found.timeout_us, found.custom) == (7, {})
    assert split_parameters({}).deadline_ns == 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("wrong", [0, -1, 0.0, 86_400_001, float("nan"), float("inf"), 2**70, True, "5", None, [5]])
def test_a_deadline_that_is_none_is_refused_by_name(wrong):
    with pytest.raises(InvalidRequest, match="'edge_deadline_ms'"):
        split_parameters({"edge_deadline_ms": wrong})


def test_the_reserved_prefix_is_refused_unless_allowed():
    key = "triton_enable_empty_final_response"
    with pytest.raises(InvalidRequest, match="parameter keys starting with 'triton_' are reserved for Triton usage"):
        split_parameters({key: True})
    assert split_parameters({key: True}, allow=(key,)).custom == {key: True}


def test_regions_need_a_name_and_a_size():
    full = {"shared_memory_region": "r", "shared_memory_offset": 8, "shared_memory_byte_size": 64}
    assert region_reference(full, "input 'x'") == RegionRef("r", 8, 64)
    del full["shared_memory_offset"]
    assert region_reference(full, "input 'x'") == RegionRef("r", 0, 64)
    assert region_reference({}, "input 'x'") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"shared_memory_region": "r"},
        {"shared_memory_region": 1, "shared_memory_byte_size": 1},
        {"shared_memory_region": "r", "shared_memory_byte_size": -1},
        {"shared_memory_region": "r", "shared_memory_byte_size": 2**63},
        {"shared_memory_region": "r", "shared_memory_byte_size": 1, "shared_memory_offset": "0"},
        {"shared_memory_offset": 1},
        {"shared_memory_byte_size": 1},
    ],
)
def test_half_a_region_is_refused(wrong):
    with pytest.raises(InvalidRequest, match="shared_memory"):
        region_reference(wrong, "input 'x'")


def test_requested_outputs_read_what_they_know_and_ignore_the_rest():
    assert requested_output("o", {}) == RequestedOutput("o")
    assert requested_output("o", {"binary_data": False, "unknown": []}) == RequestedOutput("o", binary=False)
    assert requested_output("o", {"classification": 3}) == RequestedOutput("o", classification=3)


@pytest.mark.parametrize("wrong", [{"binary_data": 1}, {"classification": -1}, {"classification": True}])
def test_wrong_output_parameters_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        requested_output("o", wrong)


def test_classes_cannot_go_to_shared_memory():
    with pytest.raises(InvalidRequest, match="can't set both 'shared_memory_region' and 'classification'"):
        requested_output("o", {"classification": 1, "shared_memory_region": "r", "shared_memory_byte_size": 8})


def test_binary_sizes_are_unsigned():
    assert binary_data_size({"binary_data_size": 0}) == 0
    assert binary_data_size({}) is None
    with pytest.raises(InvalidRequest):
        binary_data_size({"binary_data_size": -1})


@given(
    st.dictionaries(
        st.sampled_from(["sequence_id", "priority", "timeout", "sequence_end", "binary_data_output", "k", "triton_x"])
        | st.text(max_size=4),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.none(), max_size=1),
    )
)
def test_any_parameters_are_split_or_refused(raw):
    try:
        found = split_parameters(raw)
    except InvalidRequest:
        return
    assert set(found.custom) <= set(raw)


def test_versions_are_decimal_numbers():
    table = [("", None), ("0", 0), ("1", 1), ("007", 7), (str(2**63 - 1), 2**63 - 1)]
    assert [(text, parse_version(text)) for text, _ in table] == table


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", ["-1", "+1", " 1", "1.0", "one", "٣", "²", str(2**63), "9" * 5000])
def test_other_version_texts_are_refused(text):
    with pytest.raises(InvalidRequest, match="failed to get model version from specified version string") as caught:
        parse_version(text)
    assert len(caught.value.message) < 300


def test_headers_pass_on_by_whole_name_only():
    pattern = re.compile("x-frame-.*", re.IGNORECASE)
    headers = [("X-Frame-Id", "7"), ("Not-X-Frame-Id", "8"), ("Host", "h")]
    assert header_parameters(headers, pattern) == {"X-Frame-Id": "7"}
    assert header_parameters(headers, None) == {}


@pytest.mark.parametrize("name", ["priority", "Sequence_Id", "headers", "triton_x", "TRITON_X"])
def test_headers_with_reserved_names_are_refused(name):
    with pytest.raises(InvalidRequest, match="reserved"):
        header_parameters([(name, "1")], re.compile(".*"))


def test_headers_that_are_not_text_are_refused():
    with pytest.raises(InvalidRequest, match="printable"):
        header_parameters([("x-a", "\udcff")], re.compile("x-.*"))
