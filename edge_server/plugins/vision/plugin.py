"""Entry module of the plugin `vision`: image files as bodies of inference requests, the HTTP route that returns what a
model finds in an image, recognition of the layout of a model's outputs, checks of image models at load."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from edge_server.plugin import Plugin, RunningPlugin, ServingCore, StatusPart, StatusRow

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.core.model_spec import ModelSpec, Recognised
    from edge_server.core.tensor import Tensor
    from edge_server.core.version_lifecycle import OutputCheck, SampleRun
    from edge_server.frontends.http.body_reader import Body
    from edge_server.frontends.http.request import HttpRequest
    from edge_server.frontends.http.response import HttpResponse
    from edge_server.frontends.http.routes import Route
    from edge_server.frontends.v2.requested_outputs import RequestedOutput
    from edge_server.plugins.vision.image_bodies import ImageBodies
    from edge_server.plugins.vision.text_reading import TextModelLog
    from edge_server.telemetry.event_bus import Event


METADATA_KEYS = frozenset({
    "stride", "character", "model_info/model_type", "metadata.yaml", "metadata.json", "packed/metadata.json",
    "config.json", "infer_cfg.yml", "inference.yml", "tflite_metadata",
})  # fmt: skip
"""Keys of metadata, one of which every known exporter of image models writes."""

TENSOR_NAMES = frozenset({"dets", "cls_8", "anomaly_map", "scale_factor"})
"""Names of outputs, one of which every layout has that its outputs prove, and of PaddleDetection's other input."""


def _recognise(spec: ModelSpec, metadata: Mapping[str, str]) -> Recognised | None:
    # Importing the rest takes a tenth of a second.
    names = {*(item.name for item in spec.inputs), *(item.name.lower() for item in spec.outputs)}
    is_known = not (METADATA_KEYS.isdisjoint(metadata) and TENSOR_NAMES.isdisjoint(names))
    if not is_known and "preprocessing" not in spec.parameters:
        return None
    from edge_server.plugins.vision.layout_recognition import recognise

    return recognise(spec, metadata)


class VisionPlugin(Plugin):
    name = "vision"
    recognisers = (_recognise,)

    def parameter_names(self) -> Iterable[str]:
        from edge_server.plugins.vision import image_parameters
        from edge_server.plugins.vision.outputs import output_parameters

        return ("preprocessing", *image_parameters.KEYS, *output_parameters.KEYS)

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return Vision()


class Vision(RunningPlugin):
    """Image request bodies, the results of an image, and the check of detectors with a picture.

    Imports the rest with the first image or model that needs it: a server without images saves the memory.
    """

    _core: ServingCore

    def __init__(self) -> None:
        self.output_checks = (self._check_sample,)
        self.body_decoders = {"image/": self._decode_image, "multipart/form-data": self._decode_image}

    def _check_sample(self, spec: ModelSpec) -> OutputCheck | None:
        """Return the check of a detector's answer, or None. Raises BadModelConfig if the image or output parameters of
        a model do not fit it."""
        if not spec.all_parameters:
            return None
        from edge_server.plugins.vision.demo_picture_path import PICTURE
        from edge_server.plugins.vision.detector_sample_check import sample_check

        return sample_check(spec, PICTURE)

    def examine(self, spec: ModelSpec, run: SampleRun | None) -> Sequence[str]:
        problems = self._find_text_problems([spec])
        if run is None or not spec.all_parameters:
            return problems
        from edge_server.plugins.vision.detector_sample_check import check_noise

        return (*problems, *check_noise(spec, run))

    def build(self, core: ServingCore) -> None:
        self._core = core

    def models_settled(self) -> None:
        self._core.events.subscribe(self._receive)
        self._log_text_models()

    def status(self) -> Sequence[StatusPart]:
        problems = self._find_text_problems(self._text_detectors())
        return [StatusRow("text", "warning", problem) for problem in problems]

    def _receive(self, event: Event) -> None:
        from edge_server.telemetry.event_bus import MODEL_FAILED, MODEL_READY, MODEL_UNLOADED

        if event.kind in (MODEL_READY, MODEL_FAILED, MODEL_UNLOADED):
            self._log_text_models()

    def _text_detectors(self) -> list[ModelSpec]:
        specs = [version.spec for version in self._core.service.router.all_ready()]
        return [spec for spec in specs if "detection_text_model" in spec.all_parameters]

    def _find_text_problems(self, specs: Sequence[ModelSpec]) -> list[str]:
        if not any("detection_text_model" in spec.all_parameters for spec in specs):
            return []
        from edge_server.plugins.vision.text_reading import find_text_model_problem

        problems = ((spec.name, find_text_model_problem(self._core.service.router, spec)) for spec in specs)
        return [f"model '{name}': {problem}" for name, problem in problems if problem]

    def _log_text_models(self) -> None:
        if detectors := self._text_detectors():
            self._text_model_log.update(detectors)

    @functools.cached_property
    def _text_model_log(self) -> TextModelLog:
        from edge_server.plugins.vision.text_reading import TextModelLog

        return TextModelLog(self._core.service.router)

    def routes(self) -> Sequence[Route]:
        from edge_server.frontends.http.routes import Route

        async def perceive(request: HttpRequest) -> HttpResponse:
            from edge_server.plugins.vision.perception_endpoint import perceive

            return await perceive(self._core.service, request)

        path, summary = "/edge/v1/models/{model}/perception", "Classes, detections and mask of an image file"
        schema = "edge_server.plugins.vision.schemas:PERCEPTION"
        return (Route("POST", path, "inference", summary, perceive, schema=schema),)

    @functools.cached_property
    def _images(self) -> ImageBodies:
        from edge_server.plugins.vision.image_bodies import ImageBodies

        return ImageBodies()

    def _decode_image(
        self, content_type: str, body: Body, spec: ModelSpec
    ) -> tuple[dict[str, Tensor], dict[str, RequestedOutput]]:
        return self._images.decode(content_type, body, spec)


PLUGIN = VisionPlugin()
