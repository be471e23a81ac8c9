"""Requested outputs: classification and shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Cancelled, InvalidRequest, NotFound
from edge_server.frontends.v2.requested_outputs import RegionRef, RequestedOutput, classify, pin_places
from edge_server.memory.region_pins import RequestRegions


def classes(values, dtype=DType.FP32, k=3, labels=(), has_batch=False):
    result = classify(Tensor("out", dtype, np.array(values, dtype.numpy)), k, labels, has_batch)
    assert result.dtype is DType.BYTES
    return result.array.tolist()


def test_scores_are_written_as_printf_does_best_first():
    assert classes([0.1, 0.7, 0.2], k=2) == [b"0.700000:1", b"0.200000:2"]
    assert classes([1e9, -1e-9, 3], k=3) == [b"1000000000.000000:0", b"3.000000:2", b"-0.000000:1"]


def test_labels_follow_the_index_where_there_is_one():
    assert classes([1, 2, 3], k=3, labels=("cat", "")) == [b"3.000000:2", b"2.000000:1", b"1.000000:0:cat"]
    assert classes([1], labels=("Käse",)) == ["1.000000:0:Käse".encode()]


def test_the_batch_dimension_stays_and_the_rest_is_one_row():
    result = classify(Tensor("out", DType.INT32, np.arange(12, dtype="<i4").reshape(2, 3, 2)), 2, (), True)
    assert result.array.tolist() == [[b"5:5", b"4:4"], [b"11:5", b"10:4"]]
    assert classify(Tensor("out", DType.INT32, np.arange(4, dtype="<i4").reshape(2, 2)), 1, (), False).shape == (1,)


def test_more_classes_than_there_are_is_all_of_them():
    assert classes([1, 2], k=2**62) == [b"2.000000:1", b"1.000000:0"]


@pytest.mark.parametrize("rows", [0, 2])
def test_empty_outputs_have_no_classes(rows):
    result = classify(Tensor("out", DType.FP32, np.empty((rows, 0), "<f4")), 3, (), True)
    assert result.shape == (rows, 0)


def test_equal_scores_keep_their_order_and_nan_comes_last():
    assert classes([5, 5, 5, 5], DType.UINT8, k=3) == [b"5:0", b"5:1", b"5:2"]
    assert classes([np.nan, 1, np.inf], k=3) == [b"inf:2", b"1.000000:1", b"nan:0"]


def test_the_ends_of_integer_ranges_are_ordered():
    low, high = -(2**63), 2**63 - 1
    assert classes([0, low, high], DType.INT64) == [f"{high}:2".encode(), b"0:0", f"{low}:1".encode()]
    assert classes([0, 2**64 - 1], DType.UINT64) == [b"18446744073709551615:1", b"0:0"]


def test_halves_and_bfloats_are_compared_by_value():
    assert classes([1.5, -2], DType.FP16, k=1) == [b"1.500000:0"]
    # BF16 bit patterns of -1 and 2: as plain integers they would be ordered the other way.
    assert classes([0xBF80, 0x4000], DType.BF16, k=2) == [b"2.000000:1", b"-1.000000:0"]


@pytest.mark.parametrize("dtype", [DType.BYTES, DType.BOOL])
def test_types_without_scores_are_refused(dtype):
    with pytest.raises(InvalidRequest, match=f"'out' due to unsupported type '{dtype.value}'"):
        classify(Tensor("out", dtype, np.zeros(2, dtype.numpy)), 1, (), False)


class StubPin:
    device = None

    def __init__(self, view):
        self.view = view
        self.releases = 0

    def release(self):
        self.releases += 1

    def write(self, data):
        self.view[: len(data)] = data


class StubRegions:
    def __init__(self, size):
        self.memory = bytearray(size)
        self.pins = []

    def pin(self, name, offset, byte_size, *, writable=False):
        if name == "gone":
            raise NotFound(name)
        self.pins.append(StubPin(memoryview(self.memory)[offset : offset + byte_size]))
        return self.pins[-1]


OUT = Tensor("out", DType.INT32, np.array([1, 2], "<i4"))


def places(regions, region):
    return pin_places([RequestedOutput("out", region=region), RequestedOutput("other")], regions)


def test_a_result_is_written_to_its_region_which_is_held_until_the_release():
    regions = StubRegions(16)
    held = places(regions, RegionRef("r", 4, 12))
    assert held.write(OUT, RegionRef("r", 4, 12)) == 8
    assert bytes(regions.memory) == bytes(4) + b"\1\0\0\0\2\0\0\0" + bytes(4)
    assert [pin.releases for pin in regions.pins] == [0]
    held.release()
    held.release()
    assert [pin.releases for pin in regions.pins] == [1]
    with pytest.raises(Cancelled, match="output 'out'"):
        held.write(OUT, RegionRef("r", 4, 12))


def test_a_region_that_is_too_small_is_refused_untouched():
    regions = StubRegions(16)
    with pytest.raises(InvalidRequest, match=r"output 'out' \(7 bytes\) should be at least 8 bytes"):
        places(regions, RegionRef("r", 0, 7)).write(OUT, RegionRef("r", 0, 7))
    assert not any(regions.memory)


def test_of_several_regions_none_stays_pinned_when_one_is_missing():
    regions = StubRegions(16)
    wanted = [RequestedOutput("a", region=RegionRef("r", 0, 4)), RequestedOutput("b", region=RegionRef("gone", 0, 4))]
    with pytest.raises(NotFound):
        pin_places(wanted, regions)
    assert [pin.releases for pin in regions.pins] == [1]


def test_pins_are_released_once():
    regions = StubRegions(4)
    pins = RequestRegions(regions)
    assert not pins
    pins.pin(RegionRef("r", 0, 4))
    assert pins
    pins.release()
    pins.release()
    assert regions.pins[0].releases == 1
