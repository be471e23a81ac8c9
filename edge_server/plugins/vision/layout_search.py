"""Search for the layouts that a model's shapes and metadata fit, see the table `layouts.LAYOUTS`.

Metadata name the layouts that a model may have, and the shapes decide: if they agree, the match is certain. Shapes
alone give candidates. What they leave open is in `LayoutMatch.doubts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec, Recognised
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.exporters import (
    hugging_face,
    openvino_model_info,
    paddle_detection,
    paddle_ocr,
    tflite_support,
    ultralytics,
)
from edge_server.plugins.vision.exporters.exported_metadata import ExportedMetadata, UnfitMetadataError
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.layouts import IMAGENET_VALUES, LAYOUTS, PADDLE_INPUTS, Layout, match_shapes, substitute
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize, count_cells
from edge_server.plugins.vision.outputs.output_tensors import drop_batch_dim
from edge_server.plugins.vision.perception_decoder import make_perception_decoder

_FIT_KEYS = ("image_fit", "image_resize", "image_crop_offset", "keep_aspect_ratio", "enable_padding", "crop_mode")
_SCALE_KEYS = ("image_scale", "image_mean", "image_stddev")
_STRIDES = (4, 8, 16, 32, 64)
_ASSUMED_SIDE = 640
_ROW_SIZE = 6
"""Numbers of a row of PaddleDetection: class, score, box."""
_MAX_MAP_STRIDE = 32
"""Greatest number of pixels of the input per pixel of a map."""
_MAX_LINE_HEIGHT = 64
"""Greatest height of a line of text in pixels. Recognisers have 32, 48 or 64."""
MAX_PERMUTED = 4
"""Greatest number of outputs that are tried in every order."""
MAX_CLASSES = 2000
"""Greatest number of classes of detectors that shapes alone assume. The largest data sets have 1,203."""
_PARSERS: Mapping[str, Callable[[Mapping[str, str]], ExportedMetadata | None]] = {
    "a YOLO export": ultralytics.read_metadata,
    "Hugging Face's transformers": hugging_face.read_metadata,
    "PaddleDetection": paddle_detection.read_metadata,
    "PaddleOCR": paddle_ocr.read_metadata,
    "OpenVINO's model_info": openvino_model_info.read_metadata,
    "TFLite Support": tflite_support.read_metadata,
}


class LayoutMatch(NamedTuple):
    """A layout that a model may have. `parameters` hold beside those of the configuration, which win. `labels` are the
    class names of outputs, by output.

    `is_certain`: metadata and shapes agree, or the shapes and names are unmistakable. `evidence` says what speaks for
    the layout, each of `doubts` what nothing proves; both are for people. `class_count` 0: it has no classes, or the
    shapes leave their number open.
    """

    layout: str
    task: str
    title: str
    parameters: Mapping[str, str]
    labels: Mapping[str, tuple[str, ...]]
    is_certain: bool
    evidence: str
    doubts: tuple[str, ...] = ()
    class_count: int = 0


def candidates(
    spec: ModelSpec, metadata: Mapping[str, str], class_names: tuple[str, ...] = ()
) -> tuple[LayoutMatch, ...]:
    """Return the layouts that a model may have, the likeliest first; empty if none is known.

    `spec` needs inputs and outputs, and is not changed; a head in its `parameters` is ignored. `metadata` are those
    that a recogniser gets: `ModelSignature.metadata` and the texts of `repository.metadata_files`. Every result has
    been checked: with its parameters beside those of `spec` the model loads, unless these contradict them. A match by
    metadata is certain and the only result. `class_names` replace those of the metadata in each layout that has as many
    classes.
    """
    try:
        certain = find_stated_layout(spec, metadata, class_names)
    except UnfitMetadataError:
        certain = None
    if certain is not None:
        return (certain,)
    names = class_names or paddle_ocr.read_packed_names(metadata)
    return tuple(sorted(_match_all(spec, LAYOUTS, names), key=lambda match: not match.is_certain))


def find_unmistakable_layout(spec: ModelSpec) -> LayoutMatch | None:
    """Return the layout whose shapes and names of outputs suffice, or None."""
    return next(_match_all(spec, [layout for layout in LAYOUTS if layout.is_unmistakable]), None)


def _match_all(spec: ModelSpec, layouts: Sequence[Layout], names: tuple[str, ...] = ()) -> Iterator[LayoutMatch]:
    """Yield the layouts that the shapes of a model fit. `names` are those of its classes if they are as many."""
    for layout in layouts:
        try:
            match = _Model(spec, None, names).match(layout)
            check_match(spec, match)
        except (UnfitMetadataError, BadModelConfig):
            continue
        yield match


def find_stated_layout(
    spec: ModelSpec, metadata: Mapping[str, str], class_names: tuple[str, ...] = ()
) -> LayoutMatch | None:
    """Return the layout that the metadata state, or None for metadata of no known exporter. `class_names` as for
    `candidates`.

    Raises UnfitMetadataError, a whole sentence, if the metadata do not fit the model, and BadModelConfig for a wrong
    parameter of the configuration.
    """
    for source, read in _PARSERS.items():
        try:
            exported = read(metadata)
            if exported is not None:
                return _match_stated_layout(spec, exported, class_names)
        except UnfitMetadataError as error:
            raise UnfitMetadataError(
                f"its metadata are those of {source}, but nothing is recognised: {error}"
            ) from None
    return None


def joins_rows_of_batch(spec: ModelSpec, metadata: Mapping[str, str]) -> bool:
    """Return whether a model that batches lists the rows of all pictures in one output, as PaddleDetection's NMS does.

    Its first dimension has any size, and so seems to be that of the batch.
    """
    is_paddle = "infer_cfg.yml" in metadata or any(item.name in PADDLE_INPUTS for item in spec.inputs)
    return is_paddle and spec.max_batch_size > 0 and any(output.dims == (_ROW_SIZE,) for output in spec.outputs)


def _match_stated_layout(spec: ModelSpec, exported: ExportedMetadata, class_names: tuple[str, ...]) -> LayoutMatch:
    model = _Model(spec, exported, class_names)
    errors = []
    stated = [layout for layout in LAYOUTS if layout.name in exported.layouts]
    for layout in [layout for layout in stated if len(layout.outputs) == len(spec.outputs)] or stated:
        try:
            match = model.match(layout)
        except _ShapeMismatchError as error:
            errors.append(error)
            continue
        try:
            check_match(spec, match)
        except BadModelConfig as error:
            if spec.parameters and _fits(replace(spec, parameters={}), match):
                raise  # the configuration's own parameters are wrong
            raise UnfitMetadataError(error.message) from None
        return match
    # The outputs are alike in all of them.
    expected = " or ".join(dict.fromkeys(error.expected for error in errors))
    raise UnfitMetadataError(f"{errors[0].given}, expected {expected}{model.describe_symbols()}")


def _fits(spec: ModelSpec, match: LayoutMatch) -> bool:
    try:
        check_match(spec, match)
    except BadModelConfig:
        return False
    return True


def check_match(spec: ModelSpec, match: LayoutMatch) -> None:
    """Raise BadModelConfig if a model with the parameters of a match cannot convert images or outputs."""
    with_it = replace(spec, recognised=Recognised(match.parameters, match.labels, ""))
    make_image_plan(with_it)
    make_perception_decoder(with_it)


class _ShapeMismatchError(UnfitMetadataError):
    """The outputs have other shapes than a layout: "`given`, expected `expected`"."""

    def __init__(self, given: str, expected: str) -> None:
        super().__init__(f"{given}, expected {expected}")
        self.given, self.expected = given, expected


class _Model:
    """A model and what its metadata say, compared with one layout after the other."""

    def __init__(self, spec: ModelSpec, exported: ExportedMetadata | None, names: tuple[str, ...] = ()) -> None:
        """Raises UnfitMetadataError for inputs that take no picture."""
        self._spec, self._exported, self._names = spec, exported, names
        self._input = self._find_input()
        self._size, self._is_size_assumed = self._find_size()

    def describe_symbols(self) -> str:
        assert self._exported is not None
        symbols = self._exported.symbols
        names = f" for {symbols['C']} names" if "C" in symbols else ""
        return f"{names} and {symbols['K']} keypoints" if "K" in symbols else names

    def match(self, layout: Layout) -> LayoutMatch:
        """Return the match with a layout. Raises UnfitMetadataError if the model has other outputs."""
        outputs, symbols = self._match_outputs(layout)
        if self._exported is None and layout.task != "classify" and symbols.get("C", 0) > MAX_CLASSES:
            raise UnfitMetadataError(f"{symbols['C']} classes")
        if self._takes_lines and layout.task != "classify":
            raise UnfitMetadataError("the input is one line of text")
        boxes_in_grid = self._check_box_count(layout, outputs, symbols)
        self._check_map_size(symbols)
        parameters = self._image_parameters(layout) | self._other_inputs(layout)
        joined = ",".join(output.name for output in outputs)
        known = {"output": joined, "first": outputs[0].name, **{k: str(v) for k, v in symbols.items()}}
        try:
            parameters = {key: value.format_map(known) for key, value in layout.parameters.items()} | parameters
        except KeyError as error:
            raise UnfitMetadataError(f"the size {error.args[0]} of [{'], ['.join(layout.outputs)}] is open") from None
        if len(outputs) > 1 and "detection_head" in layout.parameters:
            parameters.setdefault("detection_outputs", joined)
        exported = self._exported
        shapes = ", ".join(f"'{output.name}' {list(output.dims)}" for output in outputs)
        evidence = f"outputs {shapes} fit {layout.name} [{'], ['.join(layout.outputs)}]"
        if boxes_in_grid:
            evidence += f", and A is the number of boxes of an input of {self._size.width}x{self._size.height}"
        class_count = symbols.get("C", 0)
        stated_names = () if exported is None else exported.labels
        names = self._names if self._has_names(symbols) else stated_names
        labels = {output.name: names for output in outputs} if names else {}
        if exported is not None:
            evidence = f"its metadata say {exported.title}, and its {evidence}"
            return LayoutMatch(
                layout.name, layout.task, exported.title, parameters, labels, True, evidence, class_count=class_count
            )
        classes = f", {class_count} classes" if class_count else ""
        doubts = () if layout.is_unmistakable else tuple(self._doubts(layout, symbols, boxes_in_grid))
        return LayoutMatch(
            layout.name, layout.task, f"{layout.name} {layout.task}{classes}", parameters, labels,
            layout.is_unmistakable, evidence, doubts, class_count,
        )  # fmt: skip

    def _doubts(self, layout: Layout, symbols: Mapping[str, int], boxes_in_grid: bool) -> Iterator[str]:
        if self._is_size_assumed:
            yield f"the input has any size: {self._size.width}x{self._size.height} is assumed"
        fit, scale = layout.image.get("image_fit", "stretch"), layout.image.get("image_scale", "1")
        usual = f"{layout.image['image_color']}, {fit}, scale {scale}"
        if layout.image.items() >= IMAGENET_VALUES.items():
            usual += ", mean and deviation of ImageNet, as for torchvision's weights,"
        yield f"the file does not say how it was trained: {usual} are usual"
        if layout.anchors_per_cell and not boxes_in_grid:
            yield "the number of boxes is open"
        elif not layout.anchors_per_cell and not layout.names:
            yield "only the shapes speak for this layout"
        for symbol, value in layout.usual.items():
            yield f"{symbol} = {value} is assumed"
        if layout.task != "text" and not self._has_names(symbols):
            yield "the class names are unknown"

    def _has_names(self, symbols: Mapping[str, int]) -> bool:
        return bool(self._names) and symbols.get("C") == len(self._names)

    def _other_inputs(self, layout: Layout) -> dict[str, str]:
        """Return the parameters for the inputs beside the picture. Raises UnfitMetadataError for unknown ones."""
        others = [item.name for item in self._spec.inputs if item is not self._input]
        if unknown := [name for name in others if name not in layout.inputs]:
            raise UnfitMetadataError(f"expected one input, given '{unknown[0]}' beside '{self._input.name}'")
        sides = {"W": self._size.width, "H": self._size.height}
        values = ";".join(f"{name}={layout.inputs[name].format_map(sides)}" for name in others)
        return {"image_input": self._input.name, "image_constants": values} if others else {}

    def _find_input(self) -> InputSpec:
        found = [item for item in self._spec.inputs if self._is_picture(item)]
        if not self._spec.inputs or len(found) > 1:
            raise UnfitMetadataError(f"expected one input, given {len(self._spec.inputs)}")
        if not found:
            item = self._spec.inputs[0]
            shape = drop_batch_dim(self._spec, item, 3)
            if len(shape) == 4 and shape[0] > 1:
                raise UnfitMetadataError(
                    f"it was exported with batch={shape[0]}, and each request would need {shape[0]} pictures: export "
                    "it again with batch=1, or with dynamic=True"
                )
            given = f"'{item.name}' {item.dtype.value} {list(shape)}"
            raise UnfitMetadataError(f"expected an input FP32 or FP16 [3, height, width], given {given}")
        return found[0]

    def _is_picture(self, item: InputSpec) -> bool:
        shape = drop_batch_dim(self._spec, item, 3)
        is_unchanged = self._exported is not None and self._exported.takes_bytes
        types = (DType.FP32, DType.FP16, DType.UINT8) if is_unchanged else (DType.FP32, DType.FP16)
        return len(shape) == 3 and 3 in (shape[0], shape[2]) and item.dtype in types

    @property
    def _takes_lines(self) -> bool:
        """Whether the picture has a low, fixed height and any width, as lines for recognisers of text have."""
        shape = drop_batch_dim(self._spec, self._input, 3)
        return shape[0] == 3 and shape[2] == -1 and 0 < shape[1] <= _MAX_LINE_HEIGHT

    def _find_size(self) -> tuple[NetworkSize, bool]:
        """Return the size of the input, and whether nothing states it."""
        shape = drop_batch_dim(self._spec, self._input, 3)
        height, width = shape[1:] if shape[0] == 3 else shape[:2]
        stated = None if self._exported is None else self._exported.size
        if self._exported is not None and not self._exported.is_exact_size and -1 not in (height, width):
            stated = None
        if stated is not None:
            if height not in (-1, stated.height) or width not in (-1, stated.width):
                raise UnfitMetadataError(
                    f"the metadata state an input of {stated.width}x{stated.height}, the input is {list(shape)}"
                )
            height, width = stated.height, stated.width
        if self._exported is not None and -1 in (height, width):
            raise UnfitMetadataError("expected the size of the input in the metadata, given nothing")
        is_assumed = -1 in (height, width)
        height, width = (_ASSUMED_SIDE if side == -1 else side for side in (height, width))
        if not (height and width):
            raise UnfitMetadataError(f"the input is {width} pixels wide and {height} high")
        return NetworkSize(width, height), is_assumed

    def _match_outputs(self, layout: Layout) -> tuple[Sequence[OutputSpec], dict[str, int]]:
        """Return the outputs in the order of the layout, and the sizes of its symbols as far as they are known."""
        outputs = self._spec.outputs
        if len(outputs) != len(layout.outputs):
            noun = "output" if len(layout.outputs) == 1 else "outputs"
            count = {1: "one"}.get(len(layout.outputs), str(len(layout.outputs)))
            raise UnfitMetadataError(f"expected {count} {noun}, given {len(outputs)}")
        exported = self._exported
        known = dict(layout.usual if exported is None else exported.symbols)
        orders: Iterator[Sequence[OutputSpec]] = itertools.permutations(outputs)
        if len(outputs) > MAX_PERMUTED:
            by_size = sorted(outputs, key=lambda output: (-output.dims[-1], output.dims) if output.dims else (0, ()))
            orders = iter([outputs, by_size])
        if layout.names:
            by_name = {output.name.lower(): output for output in outputs}
            is_named = all(name in by_name for name in layout.names)
            if is_named:
                orders = iter([[by_name[name] for name in layout.names]])
            elif layout.integers:
                integers = (DType.INT64, DType.INT32)
                orders = (
                    order
                    for order in orders
                    if tuple(at for at, output in enumerate(order) if output.dtype in integers) == layout.integers
                )
            else:
                orders = iter([])
        for order in orders:
            shapes = [
                drop_batch_dim(self._spec, o, s.count(",") + 1) for o, s in zip(order, layout.outputs, strict=True)
            ]
            symbols = match_shapes(layout.outputs, shapes, known)
            if symbols is not None:
                return order, symbols
        given = ", ".join(
            f"'{output.name}' is {list(drop_batch_dim(self._spec, output, shape.count(',') + 1))}"
            for output, shape in zip(outputs, layout.outputs, strict=True)
        )
        expected = ", ".join(f"[{substitute(shape, known)}]" for shape in layout.outputs)
        raise _ShapeMismatchError(f"output {given}", expected)

    def _check_box_count(self, layout: Layout, outputs: Sequence[OutputSpec], symbols: Mapping[str, int]) -> bool:
        """Return whether the number of boxes is that of the input's grids; False if it is open or has none."""
        if not layout.anchors_per_cell or "A" not in symbols or self._is_size_assumed:
            return False
        greatest = (None if self._exported is None else self._exported.max_stride) or layout.max_stride
        cells = [count_cells(self._size, stride) for stride in _STRIDES if stride <= greatest]
        counts = [layout.anchors_per_cell * sum(cells[first:]) for first in range(3)]
        if symbols["A"] not in counts:
            given = f"output '{outputs[0].name}' has {symbols['A']} boxes"
            raise _ShapeMismatchError(given, f"one of {', '.join(map(str, counts))}")
        return True

    def _check_map_size(self, symbols: Mapping[str, int]) -> None:
        """Raise _ShapeMismatchError for a map of pixels that has not the proportions of the input."""
        if self._is_size_assumed or not {"H", "W"} <= symbols.keys():
            return
        height, width = symbols["H"], symbols["W"]
        # Sides that no stride divides are rounded.
        difference = abs(height * self._size.width - width * self._size.height)
        if difference >= max(self._size.width, self._size.height) or height * _MAX_MAP_STRIDE < self._size.height:
            raise _ShapeMismatchError(
                f"an output has {width} columns and {height} rows",
                f"the proportions of an input of {self._size.width}x{self._size.height}",
            )

    def _image_parameters(self, layout: Layout) -> dict[str, str]:
        stated = self._spec.parameters
        # torchvision resizes to 256 for 224, and to 342 for 299.
        resize = round(min(self._size.width, self._size.height) * 8 / 7)
        image = {key: value.format_map({"R": resize}) for key, value in layout.image.items()}
        exported = {} if self._exported is None else self._exported.parameters
        if "image_scale" in exported:
            # The exporter says the whole of it: without a mean there is none.
            image = {key: value for key, value in image.items() if key not in _SCALE_KEYS}
        if exported.get("image_fit", "letterbox") != "letterbox":
            image.pop("image_pad_value", None)
        image |= exported
        if any(key in stated for key in _FIT_KEYS):
            image = {key: value for key, value in image.items() if key not in (*_FIT_KEYS, "image_pad_value")}
        if any(key in stated for key in _SCALE_KEYS):
            image = {key: value for key, value in image.items() if key not in _SCALE_KEYS}
        if -1 in drop_batch_dim(self._spec, self._input, 3):
            image |= {"network_image_width": str(self._size.width), "network_image_height": str(self._size.height)}
        return image
