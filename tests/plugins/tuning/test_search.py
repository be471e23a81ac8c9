"""Search for a configuration: the candidates, those that the limits exclude, and the winner."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.plugins.tuning.load.configuration_search import Search, SearchLimits, TrialOutcome, rank_trial
from edge_server.plugins.tuning.load.measurement_results import Answer, MeasuredPoint, MeasurementWindow
from edge_server.plugins.tuning.load.model_config_candidates import (
    SearchSpace,
    ServerCandidate,
    apply_candidate,
    default_space,
    why_no_bf16,
)
from edge_server.plugins.tuning.load.server_trials import as_numbers, largest_difference
from edge_server.repository.model_config.pbtxt import parse_text


def point(
    rate: float, p99_ms: float, *, level: int = 1, memory_mb: float = 100.0, power_w: float | None = None
) -> MeasuredPoint:
    answers = [Answer(0.0, p99_ms / 1000)] * 100
    window = MeasurementWindow(100 / rate, answers, server_bytes=memory_mb * 1e6)
    return MeasuredPoint.of("concurrency", level, 1, window, is_steady=True, power_w=power_w)


def outcome(candidate: ServerCandidate, *points: MeasuredPoint, **more: float | str) -> TrialOutcome:
    return TrialOutcome(candidate, points, **more)  # type: ignore[arg-type]


def test_the_current_configuration_comes_first_and_threads_are_limited() -> None:
    found = SearchSpace(("onnxruntime", "openvino"), (), (1, 4), (1, 4), (1, 8)).candidates(cores=4)
    assert found[0].is_default
    assert len(found) == len(set(found)) == 1 + 2 * 3 * 2
    assert all(item.instances * item.threads <= 8 for item in found)


def test_both_runtimes_are_tried_for_onnx_only_and_threads_if_supported() -> None:
    onnx = default_space("openvino", "model.onnx", 8, 4, tries_bf16=True)
    assert set(onnx.backends) == {"onnxruntime", "openvino"}
    assert onnx.precisions == ("f32", "bf16")
    assert onnx.batches == (1, 8)
    assert default_space("openvino", "model.xml", 0, 4, tries_bf16=False) == SearchSpace((), (), [1, 4], [1, 4], ())
    assert default_space("python", "", 1, 4, tries_bf16=True) == SearchSpace((), (), [1, 4], (), ())


def test_bf16_is_not_tried_if_onnx_runtime_lacks_it() -> None:
    assert "aarch64 only" in why_no_bf16("onnxruntime", "x86_64")
    assert why_no_bf16("onnxruntime", "aarch64") == why_no_bf16("openvino", "x86_64") == ""


def test_a_runtime_without_a_thread_setting_is_tried_without_one() -> None:
    found = SearchSpace(("onnxruntime", "tensorrt"), (), (1, 2), (1, 4), ()).candidates(cores=4)
    config = parse_text(b'backend: "onnxruntime"', "m")
    assert all(
        apply_candidate(item, config, "onnxruntime").backend == (item.backend or "onnxruntime") for item in found
    )
    assert [(item.instances, item.threads) for item in found if item.backend == "tensorrt"] == [(1, 0), (2, 0)]
    assert {item.threads for item in found if item.backend == "onnxruntime"} == {1, 4}


def test_a_candidate_changes_only_its_own_settings() -> None:
    config = parse_text(
        b"""platform: "onnxruntime_onnx" max_batch_size: 4 dynamic_batching { preferred_batch_size: [2, 4] }
        instance_group { count: 3 kind: KIND_CPU name: "mine" }
        parameters { key: "intra_op_thread_count" value { string_value: "7" } }
        parameters { key: "kept" value { string_value: "yes" } }""",
        "m",
    )
    same = apply_candidate(ServerCandidate(), config, "onnxruntime")
    assert same == config
    changed = apply_candidate(ServerCandidate("openvino", "bf16", 2, 3, 2), config, "onnxruntime")
    assert (changed.platform, changed.backend, changed.max_batch_size) == ("", "openvino", 2)
    assert list(changed.dynamic_batching.preferred_batch_size) == [2]
    assert [(group.name, group.count) for group in changed.instance_group] == [("mine", 2)]
    texts = {key: value.string_value for key, value in changed.parameters.items()}
    assert texts == {"kept": "yes", "precision": "bf16", "INFERENCE_NUM_THREADS": "6"}
    off = apply_candidate(ServerCandidate(batch=1), config, "onnxruntime")
    assert not off.HasField("dynamic_batching")
    assert off.max_batch_size == 4
    assert config.instance_group[0].count == 3


def test_the_best_point_within_the_limits_is_used() -> None:
    item = outcome(ServerCandidate(), point(10, 5, level=1), point(40, 20, level=4), point(50, 80, level=16))
    assert rank_trial(item, SearchLimits(latency_ms=30), "throughput").score == pytest.approx(40)
    assert rank_trial(item, SearchLimits(), "throughput").score == pytest.approx(50)
    assert rank_trial(item, SearchLimits(), "latency").score == pytest.approx(-5)


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (SearchLimits(latency_ms=1), "p99"),
        (SearchLimits(memory_mb=50), "memory"),
        (SearchLimits(power_w=3), "power"),
        (SearchLimits(difference=0.001), "difference"),
    ],
)
def test_a_point_above_a_limit_is_rejected_with_the_limit(limits: SearchLimits, word: str) -> None:
    judged = rank_trial(outcome(ServerCandidate(), point(10, 5, power_w=9.0), difference=0.1), limits, "throughput")
    assert not judged.is_allowed
    assert word in judged.violations[0]


def test_unmeasured_power_exceeds_no_limit() -> None:
    assert rank_trial(outcome(ServerCandidate(), point(10, 5)), SearchLimits(power_w=3), "throughput").is_allowed


def test_a_nan_difference_is_rejected() -> None:
    judged = rank_trial(
        outcome(ServerCandidate(), point(10, 5), difference=math.nan), SearchLimits(difference=0.01), "throughput"
    )
    assert not judged.is_allowed


class Box:
    """Candidates of a known throughput, and how often each was tried."""

    def __init__(self, rates: dict[ServerCandidate, float]) -> None:
        self.rates = rates
        self.tried: dict[ServerCandidate, int] = {}

    def __call__(self, candidate: ServerCandidate, round_number: int) -> TrialOutcome:
        self.tried[candidate] = self.tried.get(candidate, 0) + 1
        rate = self.rates[candidate]
        if not rate:
            return TrialOutcome(candidate, problem="does not load", round=round_number)
        return outcome(candidate, point(rate, 1000 / rate), round=round_number)


def test_successive_halving_finds_the_best_and_tries_the_worst_once() -> None:
    candidates = [ServerCandidate(), *(ServerCandidate(instances=count) for count in range(1, 20))]
    box = Box({item: 10.0 + 5 * item.instances for item in candidates})
    best = Search(box, SearchLimits()).run(candidates)
    assert best is not None
    assert best.outcome.candidate == ServerCandidate(instances=19)
    assert box.tried[ServerCandidate(instances=2)] == 1
    assert box.tried[ServerCandidate(instances=19)] == box.tried[ServerCandidate()] == max(box.tried.values())
    assert sum(box.tried.values()) < 2.5 * len(candidates)


def test_a_small_gain_is_not_worth_a_change() -> None:
    box = Box({ServerCandidate(): 100.0, ServerCandidate(instances=2): 103.0})
    best = Search(box, SearchLimits()).run(list(box.rates))
    assert best is not None
    assert best.outcome.candidate.is_default


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_better_configuration_wins_by_either_objective(objective: str) -> None:
    box = Box({ServerCandidate(): 100.0, ServerCandidate(instances=2): 200.0, ServerCandidate(instances=3): 0.0})
    search = Search(box, SearchLimits(), objective)
    best = search.run(list(box.rates))
    assert best is not None
    assert best.outcome.candidate.instances == 2
    assert search.latest[ServerCandidate(instances=3)].violations == ("does not load",)


def test_no_configuration_is_chosen_if_none_is_within_the_limits() -> None:
    box = Box({ServerCandidate(): 1.0, ServerCandidate(instances=2): 2.0})
    assert Search(box, SearchLimits(latency_ms=1)).run(list(box.rates)) is None
    assert Search(Box({ServerCandidate(): 0.0}), SearchLimits()).run([ServerCandidate()]) is None


def test_differences_are_relative_to_the_largest_value() -> None:
    before = [{"a": np.array([1.0, -4.0], np.float32)}]
    assert largest_difference(before, before) == 0
    assert largest_difference(before, [{"a": np.array([1.0, -3.0], np.float32)}]) == pytest.approx(0.25)
    assert largest_difference(before, [{"a": np.array([1.0], np.float32)}]) == 1
    assert largest_difference(before, [{"b": np.array([1.0, -4.0], np.float32)}]) == 1
    assert largest_difference(before, [{"a": np.array([1.0, np.nan], np.float32)}]) == 1
    texts = np.array([b"x"], dtype=object)
    assert largest_difference([{"a": texts}], [{"a": texts.copy()}]) == 0
    assert largest_difference([{"a": texts}], [{"a": np.array([b"y"], dtype=object)}]) == 1


def test_non_finite_values_must_be_equal() -> None:
    one = [{"a": np.array([1.0, np.inf, np.nan], np.float32)}]
    assert largest_difference(one, one) == 0
    assert largest_difference(one, [{"a": np.array([1.0, -np.inf, np.nan], np.float32)}]) == 1
    assert largest_difference(one, [{"a": np.array([1.0, np.nan, np.nan], np.float32)}]) == 1


def test_bf16_is_compared_as_numbers() -> None:
    pattern = (np.array([1.0, -2.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert as_numbers(Tensor("a", DType.BF16, pattern)).tolist() == [1.0, -2.5]
