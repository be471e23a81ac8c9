"""Sample check of a detector at load: runs it on a picture and checks its answer against the declared layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edge_server.core.model_spec import ModelSpec
from edge_server.core.version_lifecycle import OutputCheck, SampleRun
from edge_server.errors import BadModelConfig, EdgeServerError
from edge_server.plugins.vision.heads.box_candidates import NetworkSize
from edge_server.plugins.vision.heads.detections import DetectionPlan
from edge_server.plugins.vision.heads.layout_check import check_layout, count_classes, fitting_layouts
from edge_server.plugins.vision.heads.output_tensors import Reals, frame_dims
from edge_server.plugins.vision.image_plan import ImagePlan, image_plan
from edge_server.plugins.vision.perception import perception_plan
from edge_server.plugins.vision.resize import Color


def sample_check(spec: ModelSpec, picture: Path) -> OutputCheck | None:
    """Return the check of a model with a detection head, or None for any other. `picture` is a JPEG of a person.

    Raises BadModelConfig if the declaration is wrong in itself or does not match the outputs. The check returns
    warnings, and raises BadModelConfig for an answer that is impossible for the declared layout.
    """
    images, perception = image_plan(spec), perception_plan(spec)
    if images is None or perception is None or perception.detections is None:
        return None
    return partial(_check, spec, images, perception.detections, picture)


def _check(
    spec: ModelSpec, images: ImagePlan, plan: DetectionPlan, picture: Path, run: SampleRun | None
) -> tuple[str, ...]:
    parts: list[Reals] | None = None
    warnings = []
    if run is not None and images.color is not Color.DEPTH:
        try:
            outputs = run(images.fit_file(picture.read_bytes(), model=spec.name)[0])
            parts = plan.parts(outputs, 0 if spec.max_batch_size > 0 else None, model=spec.name)
        except EdgeServerError as error:
            # The model may be meant for other inputs, which work.
            warnings.append(f"its detections were not checked with the sample picture: {error.message}")
    if parts is not None:
        warnings += _check_values(spec, images, plan, parts)
        shapes = [part.shape for part in parts]
    else:
        outputs_read = [spec.output(slot.name) for slot in plan.slots]
        shapes = [
            frame_dims(spec, output, slot.rank)
            for output, slot in zip(outputs_read, plan.slots, strict=True)
            if output is not None
        ]
    class_count = count_classes(plan.declaration, shapes)
    if plan.labels and class_count is not None and class_count != len(plan.labels):
        warnings.append(
            f"detection_head {plan.declaration.head.value}: the outputs have {class_count} classes, label_filename "
            f"names {len(plan.labels)}"
        )
    return tuple(warnings)


def _check_values(spec: ModelSpec, images: ImagePlan, plan: DetectionPlan, parts: list[Reals]) -> list[str]:
    """Return warnings about an answer. Raises BadModelConfig for an impossible one."""
    size = NetworkSize(images.rule.width, images.rule.height)
    findings = check_layout(plan.declaration, size, parts)
    if not findings.impossible and not findings.doubtful:
        return []
    layouts = fitting_layouts(plan.declaration, size, parts[0], len(plan.labels)) if len(parts) == 1 else ()
    advice = f". The answer fits {', or '.join(layouts)}" if layouts else ""
    shapes = ", ".join(f"'{slot.name}' {list(part.shape)}" for slot, part in zip(plan.slots, parts, strict=True))
    subject = f"detection_head {plan.declaration.head.value}, answer {shapes} to the sample picture: "
    if findings.impossible:
        raise BadModelConfig(
            f"model '{spec.name}', {subject}{findings.impossible[0]}{advice}. The parameter warmup_probe false "
            "loads it without this check"
        )
    return [subject + "; ".join(findings.doubtful) + advice]
