"""Parser of the parameters in a model's configuration that say how an image becomes the input (`image_*`,
`network_image_*`).

PARAMETERS lists the keys. Names follow the image encoder of Isaac ROS if it has one. All values are strings; lists are
comma-separated.

A channel's value v of 0..255 becomes (v * image_scale - image_mean) / image_stddev. So mean and stddev are in units of
0..255 if image_scale is 1, and of 0..1 if it is 1/255. To avoid doubt, a configuration with one of them must state
image_scale too.

With image_color depth, v is not 0..255 but the sensor's measurement, as in 16UC1, 32FC1 and similar encodings. By ROS
REP 118 integers are millimetres and floats metres; image_depth_unit converts them to one unit. A value that is not
finite was not measured and becomes 0, as in 16UC1. image_interpolation auto then means nearest, so that no surface is
invented between a near and a far one. Integer inputs take the nearest number within their range.

image_decode fast applies to JPEG frames that are at least twice as large as their resized picture and into which no
results are drawn. The decoder then omits detail that resizing would average away. This saves about a quarter of the
decoding time; single pixels differ by up to a tenth of the range, the mean by a five-hundredth. It has no effect with
image_interpolation nearest and those with antialias, which need the pixels themselves.

`keep_aspect_ratio`, `enable_padding` and `crop_mode` of Isaac ROS are accepted instead of image_fit: keep_aspect_ratio
false is stretch, true with padding is letterbox, true without padding is crop.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NoReturn, TypeVar

from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.declared_parameter import DeclaredParameter, describe_unknown, join_values
from edge_server.plugins.vision.resize import Color, FitMode, Interpolation
from edge_server.record import record

Choice = TypeVar("Choice", bound=enum.Enum)

MAX_SIDE = 16384
"""Maximum width or height of a network's input, and maximum of image_resize, in pixels."""

MAX_TOP_K = 1000
"""Maximum number of labels returned for one image; clients that need more request the tensor."""

MAX_CONSTANTS = 16
"""Maximum number of values of another input; detectors have two."""

_PREFIXES = ("image_", "network_image_")
_ISAAC_FIT_KEYS = ("keep_aspect_ratio", "enable_padding", "crop_mode")
# Isaac ROS needs the size and encoding of its input; here each image and each frame states them itself.
_ISAAC_NEEDLESS_KEYS = ("input_encoding", "input_image_width", "input_image_height")


class Decode(enum.Enum):
    """Whether files are decoded at their full size."""

    EXACT = "exact"
    FAST = "fast"


class CropOffset(enum.Enum):
    """Rounding of half a pixel where the centre is cut out."""

    EVEN = "even"
    DOWN = "down"


class DepthUnit(enum.Enum):
    """Metres or millimetres."""

    METRES = "m"
    MILLIMETRES = "mm"


PARAMETERS = (
    DeclaredParameter("network_image_width", "pixels", "the input's dims", "width of the network's input"),
    DeclaredParameter("network_image_height", "pixels", "the input's dims", "height of the network's input"),
    DeclaredParameter("image_input", "name, a policy: names", "the only input", "input that takes the image"),
    DeclaredParameter(
        "image_constants",
        "name=number,... separated by ;",
        "no other inputs",
        "values of the other inputs for each picture, as im_shape=640,640;scale_factor=1,1",
    ),
    DeclaredParameter(
        "image_color", join_values(Color), "rgb, or gray for one channel", "the network's channels, in their order"
    ),
    DeclaredParameter("image_fit", join_values(FitMode), "stretch", "how a picture of another shape becomes the input"),
    DeclaredParameter(
        "image_resize", "pixels", "just cover the input", "with crop: length of the shorter side before the cut"
    ),
    DeclaredParameter(
        "image_crop_offset",
        join_values(CropOffset),
        "even",
        "with crop: how half a pixel is rounded, even as in torchvision, down as in transformers",
    ),
    DeclaredParameter(
        "image_pad_value", "0 to 255, one or one per channel", "0", "with letterbox: border colour, before image_scale"
    ),
    DeclaredParameter("image_interpolation", join_values(Interpolation), "auto", "how pixels are resized"),
    DeclaredParameter("image_scale", "number or fraction, as 1/255", "1", "multiplies the values 0 to 255"),
    DeclaredParameter("image_mean", "one number or one per channel", "0", "subtracted after image_scale"),
    DeclaredParameter("image_stddev", "one number or one per channel", "1", "divides after image_mean"),
    DeclaredParameter(
        "image_depth_unit", join_values(DepthUnit), "the frame's unit", "with image_color depth: unit of the input"
    ),
    DeclaredParameter(
        "image_decode", join_values(Decode), "exact", "fast: large JPEG frames are decoded at 1/2, 1/4 or 1/8"
    ),
    DeclaredParameter(
        "image_top_k", f"1 to {MAX_TOP_K}", "5, for models with classes", "number of best classes in an answer"
    ),
)
"""All keys that begin with one of _PREFIXES."""
_KEYS = tuple(parameter.key for parameter in PARAMETERS)


@record(frozen=True, slots=True)
class Declaration:
    """Image declaration, valid in itself but not yet checked against the model's input. None: not stated."""

    width: int | None
    height: int | None
    input_name: str | None
    constants: Mapping[str, tuple[float, ...]]
    color: Color | None
    mode: FitMode
    resize: int | None
    crop_offset: CropOffset
    pad_value: tuple[float, ...]
    interpolation: Interpolation
    scale: float
    mean: tuple[float, ...]
    stddev: tuple[float, ...]
    depth_unit: DepthUnit | None
    decode: Decode
    top_k: int | None


def is_declared(parameters: Mapping[str, str]) -> bool:
    """Return whether the configuration declares anything about images."""
    return any(key.startswith(_PREFIXES) for key in parameters)


def read_declaration(model: str, parameters: Mapping[str, str]) -> Declaration:
    """Return the image declaration from a model's `parameters`. Raises BadModelConfig: model, key, expected, given."""
    reader = _Reader(model, parameters)
    reader.check_keys()
    mode = reader.fit_mode()
    resize = reader.integer("image_resize", MAX_SIDE)
    if resize is not None and mode is not FitMode.CROP:
        reader.refuse("image_resize", "only together with image_fit crop")
    if "image_crop_offset" in parameters and mode is not FitMode.CROP:
        reader.refuse("image_crop_offset", "only together with image_fit crop")
    if "image_pad_value" in parameters and mode is not FitMode.LETTERBOX:
        reader.refuse("image_pad_value", "only together with image_fit letterbox")
    for key in ("image_mean", "image_stddev"):
        if key in parameters and "image_scale" not in parameters:
            reader.refuse(key, "image_scale beside it: 1 where its unit is 0..255, 1/255 where its unit is 0..1")
    return Declaration(
        width=reader.integer("network_image_width", MAX_SIDE),
        height=reader.integer("network_image_height", MAX_SIDE),
        input_name=parameters.get("image_input"),
        constants=reader.constants(),
        color=reader.choice("image_color", Color),
        mode=mode,
        resize=resize,
        crop_offset=reader.choice("image_crop_offset", CropOffset) or CropOffset.EVEN,
        pad_value=reader.pad_value(),
        interpolation=reader.choice("image_interpolation", Interpolation) or Interpolation.AUTO,
        scale=reader.scale(),
        mean=reader.numbers("image_mean", (0.0,)),
        stddev=reader.stddev(),
        depth_unit=reader.choice("image_depth_unit", DepthUnit),
        decode=reader.choice("image_decode", Decode) or Decode.EXACT,
        top_k=reader.integer("image_top_k", MAX_TOP_K),
    )


class _Reader:
    """Reads and checks one model's parameters. Raises BadModelConfig for a wrong value."""

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        self._model = model
        self._parameters = parameters

    def refuse(self, key: str, expected: str) -> NoReturn:
        given = self._parameters[key]
        raise BadModelConfig(f"model '{self._model}', parameter '{key}': expected {expected}, given '{given}'")

    def check_keys(self) -> None:
        for key in self._parameters:
            if key in _ISAAC_NEEDLESS_KEYS:
                self.refuse(key, "it to be left out, because each image says its own size and encoding")
            if key.startswith(_PREFIXES) and key not in _KEYS:
                raise BadModelConfig(f"model '{self._model}', parameter '{key}': {describe_unknown(key, _KEYS)}")

    def fit_mode(self) -> FitMode:
        stated = self.choice("image_fit", FitMode)
        isaac = [key for key in _ISAAC_FIT_KEYS if key in self._parameters]
        if not isaac:
            return stated or FitMode.STRETCH
        if stated is not None:
            self.refuse(isaac[0], "either image_fit or the names of Isaac ROS, not both")
        if self._parameters.get("crop_mode", "CENTER").upper() != "CENTER":
            self.refuse("crop_mode", "CENTER, the only cut that is offered")
        if not self._boolean("keep_aspect_ratio"):
            return FitMode.STRETCH
        return FitMode.LETTERBOX if self._boolean("enable_padding") else FitMode.CROP

    def _boolean(self, key: str) -> bool:
        """Return the value; True if it is not stated, as in Isaac ROS."""
        text = self._parameters.get(key, "true").strip().lower()
        if text not in ("true", "false", "1", "0"):
            self.refuse(key, "true or false")
        return text in ("true", "1")

    def choice(self, key: str, kind: type[Choice]) -> Choice | None:
        text = self._parameters.get(key)
        if text is None:
            return None
        found = {member.value: member for member in kind}.get(text.strip().lower())
        if found is None:
            self.refuse(key, f"one of {', '.join(str(member.value) for member in kind)}")
        return found

    def integer(self, key: str, maximum: int) -> int | None:
        text = self._parameters.get(key)
        if text is None:
            return None
        # isdecimal excludes signs, blanks and underscores; the length check excludes numbers that are slow to parse.
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= maximum):
            self.refuse(key, f"a whole number from 1 to {maximum}")
        return int(text)

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        text = self._parameters.get(key)
        if text is None:
            return default
        expected = "one number, or one for each channel separated by commas"
        values = [_number(part) for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
        found = tuple(value for value in values if value is not None)
        if len(found) != len(values) or len(found) not in (1, 3):
            self.refuse(key, expected)
        return found

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        text = self._parameters.get("image_constants", "")
        found: dict[str, tuple[float, ...]] = {}
        for item in filter(None, (part.strip() for part in text.split(";"))):
            name, has_equals, listed = item.partition("=")
            values = [_number(part) for part in listed.split(",")]
            numbers = tuple(value for value in values if value is not None)
            if not has_equals or len(numbers) != len(values) or len(values) > MAX_CONSTANTS or name.strip() in found:
                self.refuse("image_constants", "the values of other inputs as name=1,1;other=640,640")
            found[name.strip()] = numbers
        return found

    def scale(self) -> float:
        values = self.numbers("image_scale", (1.0,))
        if len(values) != 1 or values[0] == 0.0:
            self.refuse("image_scale", "one number or fraction other than 0")
        return values[0]

    def stddev(self) -> tuple[float, ...]:
        values = self.numbers("image_stddev", (1.0,))
        if 0.0 in values:
            self.refuse("image_stddev", "numbers other than 0")
        return values

    def pad_value(self) -> tuple[float, ...]:
        values = self.numbers("image_pad_value", (0.0,))
        if any(not 0 <= value <= 255 or value != int(value) for value in values):
            self.refuse("image_pad_value", "whole numbers from 0 to 255")
        return values


def _number(text: str) -> float | None:
    """Return the finite number of a decimal or a fraction, else None."""
    text = text.strip()
    if len(text) > 40:
        return None
    try:
        value = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None
