"""Agreement of precisions on pictures: the tolerance of each task, what is said, and real answers in two precisions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.output_difference import OutputDifference
from edge_server.errors import InvalidRequest
from edge_server.plugins.add.runtime_trial import try_precisions
from edge_server.plugins.trials import candidate_list, comparison
from edge_server.plugins.trials.best_candidate import Objective, SelectionRule, choose, rejection
from edge_server.plugins.trials.candidate import RuntimeCandidate
from edge_server.plugins.trials.comparison import CandidateTrial, ComparisonResult
from edge_server.plugins.trials.picture_agreement import (
    BOXES,
    MAX_PICTURES,
    SCORES,
    THRESHOLD,
    PictureAgreement,
    compare_answers,
    find_pictures,
)
from edge_server.plugins.trials.precision_report import report_precisions

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "model_repository"
COFFEE = ROOT / "tests/data/coffee.jpg"
BF16_LINE = 'parameters { key: "precision" value { string_value: "bf16" } }'


def scores(*values: float) -> dict[str, Any]:
    return {SCORES: np.array(values, np.float32)}


def boxes(*rows: tuple[float, ...]) -> dict[str, Any]:
    return {BOXES: np.array(rows, np.float32).reshape(-1, 6), THRESHOLD: np.array([0.25], np.float32)}


@pytest.mark.parametrize(
    ("same", "difference", "problem"),
    [
        (200, 0.025, ""),
        (198, 0.025, ""),
        (197, 0.025, "too few best classes agree"),
        (200, 0.15, "scores differ too much"),
    ],
)
def test_a_classifier_needs_the_same_best_classes_and_not_the_same_probabilities(
    same: int, difference: float, problem: str
) -> None:
    expected = [scores(0.5, 0.4, 0.1)] * 200
    found = [scores(0.5 + difference, 0.4 - difference, 0.1)] * same + [scores(0.4, 0.5, 0.1)] * (200 - same)
    agreement = compare_answers(expected, found)
    assert agreement.problem == problem
    assert f"the same best class in {same} of 200 pictures, scores differ by up to" in agreement.text


def test_boxes_are_found_again_by_place_and_class_and_weak_ones_may_be_lost() -> None:
    one, weak = (10.0, 10.0, 110.0, 110.0, 0.9, 1.0), (200.0, 200.0, 240.0, 240.0, 0.3, 0.0)
    near = (12.0, 10.0, 112.0, 110.0, 0.88, 1.0)
    agreement = compare_answers([boxes(one, weak)], [boxes(near)])
    assert agreement.problem == ""
    assert agreement.text.startswith("1 of 1 box in 1 picture found again, with a mean IoU of 0.961, scores differ by")
    other_class = (*near[:5], 2.0)
    assert compare_answers([boxes(one)], [boxes(other_class)]).problem == "too few boxes are found again"
    assert compare_answers([boxes(one)], [boxes(one, (200, 200, 240, 240, 0.8, 0))]).problem
    moved = (30.0, 10.0, 130.0, 110.0, 0.9, 1.0)
    assert compare_answers([boxes(one)], [boxes(moved)]).problem == "boxes are at other places"
    assert compare_answers([boxes()], [boxes()]).problem == "the pictures show nothing to compare"


def test_other_outputs_keep_a_tolerance_relative_to_their_greatest_value() -> None:
    depth = np.array([[1.0, 100.0]], np.float32)
    assert compare_answers([{"depth": depth}], [{"depth": depth + 0.9}]).problem == ""
    assert compare_answers([{"depth": depth}], [{"depth": depth + 1.1}]).problem == "more than 0.01"


def trial(precision: str, ms: float, agreement: PictureAgreement | None = None, reason: str = "") -> CandidateTrial:
    times = {} if reason else {1: [ms, ms * 1.5]}
    return CandidateTrial(
        RuntimeCandidate("openvino", precision), {}, {} if reason else {"precision": precision, "load_ms": 1.0},
        OutputDifference(0.025, 0.2, 1.0), times, 1, reason, agreement=agreement,
    )  # fmt: skip


def test_the_fastest_that_agrees_is_advised_and_each_failure_has_its_reason() -> None:
    fine, bad = PictureAgreement("same", ""), PictureAgreement("other", "too few best classes agree")
    trials = [trial("f32", 10.0), trial("bf16", 6.0, fine), trial("f16", 5.0, bad), trial("int8", 0, reason="no file")]
    found = report_precisions(trials, trials[0], "")
    assert found.lines == [
        "openvino bf16: 1.7 times as fast as f32 (6 and 10 ms): same",
        "openvino f16: 2.0 times as fast as f32 (5 and 10 ms): other (too few best classes agree)",
        "openvino int8: no file",
    ]
    assert found.advice == f"This line in config.pbtxt turns bf16 on:\n  {BF16_LINE}"
    assert found.note.startswith(
        "precision: openvino bf16 is 1.7 times as fast as f32 (6 and 10 ms): same; openvino f16"
    )
    # The other runtime, which was measured before, is as fast in the usual precision.
    assert report_precisions(trials, trials[0], "", usual_ms=6.0).advice == ""
    # A runtime that the configuration names has to be replaced.
    assert 'with backend: "openvino"' in report_precisions(trials, trials[0], "onnxruntime").advice
    slow = [trials[0], trial("bf16", 9.0, fine)]
    found = report_precisions(slow, slow[0], "")
    assert found.advice == ""
    assert found.note.startswith(
        "precision: openvino bf16 is not 20 % faster than f32 (9 and 10 ms): same, measured 20"
    )
    failed = [trials[0], trials[-1]]
    assert report_precisions(failed, failed[0], "").note.startswith("precision: there is only f32 here, measured 20")


def test_pictures_decide_over_another_precision_and_never_over_another_runtime() -> None:
    rule = SelectionRule(Objective.LATENCY, 0.01)
    reference = trial("f32", 10.0)
    reference.difference = OutputDifference(0.0, 0.0, 1.0)
    unseen, agreeing = trial("bf16", 6.0), trial("bf16", 6.0, PictureAgreement("same", ""))
    assert rejection(unseen, rule) == "beyond tolerance"
    assert rejection(agreeing, rule) == ""
    assert rejection(trial("bf16", 6.0, PictureAgreement("other", "scores differ too much")), rule)
    outcome = ComparisonResult((reference, agreeing), reference, {}, 1)
    assert choose(outcome, rule) is agreeing
    same_precision = trial("f32", 5.0)
    same_precision.compare_pictures(reference, [scores(1, 0)], [scores(1, 0)])
    assert same_precision.agreement is None
    assert rejection(same_precision, rule) == "beyond tolerance"


def test_pictures_are_one_file_or_those_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.PNG", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in find_pictures(tmp_path)] == ["a.PNG", "b.jpg"]
    assert find_pictures(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]
    for number in range(MAX_PICTURES):
        (tmp_path / f"c{number}.jpg").write_bytes(b"")
    assert len(find_pictures(tmp_path)) == MAX_PICTURES
    with pytest.raises(InvalidRequest, match="no such file or folder"):
        find_pictures(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="holds no picture"):
        find_pictures(tmp_path / "empty")


@pytest.mark.usefixtures("tried_here")
def test_the_bundled_classifier_is_compared_on_real_pictures_in_each_precision_of_the_processor(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED / "efficientnet_lite0", tmp_path / "models/efficientnet_lite0")
    found = try_precisions(tmp_path / "models", "efficientnet_lite0", (), [COFFEE], {}, tmp_path)
    assert found is not None
    by_title = dict(line.split(": ", 1) for line in found.lines)
    assert set(by_title) == {"openvino bf16", "openvino f16"}
    for line in by_title.values():
        # A processor without the arithmetic says so.
        assert "the same best class in 1 of 1 picture" in line or "precision" in line
    (tmp_path / "damaged.jpg").write_bytes(b"no picture")
    (tmp_path / "again").mkdir()
    pictures = [COFFEE, tmp_path / "damaged.jpg"]
    with pytest.raises(InvalidRequest, match=r"picture '.*damaged\.jpg'"):
        try_precisions(tmp_path / "models", "efficientnet_lite0", (), pictures, {}, tmp_path / "again")


@pytest.mark.usefixtures("tried_here")
def test_one_process_tries_all_precisions_also_after_one_that_the_processor_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []

    class Counted(comparison.CandidateProcess):
        def open(self, job: Any, report: Any) -> dict[str, Any]:
            started.append(job["runtime"])
            return super().open(job, report)

    monkeypatch.setattr(comparison, "CandidateProcess", Counted)
    monkeypatch.setattr(candidate_list, "_REDUCED_CPU_PRECISIONS", {"onnxruntime": (), "openvino": ("f64", "auto")})
    shutil.copytree(BUNDLED / "efficientnet_lite0", tmp_path / "models/efficientnet_lite0")
    found = try_precisions(tmp_path / "models", "efficientnet_lite0", (), [COFFEE], {}, tmp_path)
    assert found is not None
    assert len(started) == 1
    # The one after it was opened: what "auto" chooses depends on the processor.
    assert [line.split(": ")[0] for line in found.lines][:1] == ["openvino f64"]
    assert "does not offer precision 'f64'" in found.lines[0]
    assert not any("openvino auto: model" in line for line in found.lines)
