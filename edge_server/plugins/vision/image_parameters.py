"""Declaration of the parameters in a model's configuration that say how an image becomes the input (`image_*`,
`network_image_*`).

docs/reference/model-parameters.md describes them. Names follow the image encoder of Isaac ROS if it has one. Its
`keep_aspect_ratio`, `enable_padding` and `crop_mode` stand for image_fit: keep_aspect_ratio false is stretch, true with
padding is letterbox, true without padding is crop.

Integer inputs take the nearest number within their range. image_decode fast omits detail that resizing would average
away: single pixels differ by up to a tenth of the range, the mean by a five-hundredth. It has no effect on frames into
which results are drawn, and with image_interpolation nearest and those with antialias, which need the pixels.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from edge_server.config.model_parameters import (
    BOOLEAN,
    ParameterReader,
    choice,
    kind_of,
    parse_decimal,
    settings_of,
    text_kind,
    whole,
)
from edge_server.config.setting import Kind, setting
from edge_server.plugins.vision.resize import Color, FitMode, Interpolation
from edge_server.record import record

MAX_SIDE = 16384
"""Maximum width or height of a network's input, and maximum of image_resize, in pixels."""

MAX_TOP_K = 1000
"""Maximum number of labels returned for one image; clients that need more request the tensor."""

DEFAULT_TOP_K = 5
"""Number of labels returned for one image if neither the request nor `image_top_k` states it."""

MAX_CONSTANTS = 16
"""Maximum number of values of another input; detectors have two."""

_PREFIXES = ("image_", "network_image_")
_ISAAC_FIT_KEYS = ("keep_aspect_ratio", "enable_padding", "crop_mode")
_NEEDED_FIT = {"image_resize": FitMode.CROP, "image_crop_offset": FitMode.CROP, "image_pad_value": FitMode.LETTERBOX}
# Isaac ROS needs the size and encoding of its input; here each image and each frame states them itself.
_ISAAC_NEEDLESS_KEYS = ("input_encoding", "input_image_width", "input_image_height")


class Decode(enum.Enum):
    """Whether files are decoded at their full size."""

    EXACT = "exact"
    FAST = "fast"


class CropOffset(enum.Enum):
    """Rounding of half a pixel where the centre is cut out of the resized picture; BEFORE: it is cut out of the picture
    itself, and then resized."""

    EVEN = "even"
    DOWN = "down"
    BEFORE = "before"


class DepthUnit(enum.Enum):
    """Metres or millimetres."""

    METRES = "m"
    MILLIMETRES = "mm"


def _parse_number(given: str) -> float:
    """Return the number of a decimal or a fraction, NaN without one."""
    given = given.strip()
    if "/" not in given:
        return parse_decimal(given)
    try:
        return float(Fraction(given)) if len(given) <= 40 else math.nan
    except (ValueError, ZeroDivisionError, OverflowError):
        return math.nan


def _parse_numbers(given: str) -> tuple[float, ...]:
    found = tuple(map(_parse_number, given.strip().removeprefix("[").removesuffix("]").split(",")))
    if len(found) not in (1, 3) or not all(map(math.isfinite, found)):
        raise ValueError("expected one number, or one for each channel separated by commas")
    return found


def _per_channel(values: str, expected: str = "", is_allowed: Callable[[float], bool] = math.isfinite) -> Kind:
    def parse(given: str) -> tuple[float, ...]:
        found = _parse_numbers(given)
        if not all(map(is_allowed, found)):
            raise ValueError(f"expected {expected}")
        return found

    return kind_of(values, parse)


def _parse_scale(given: str) -> float:
    found = _parse_numbers(given)
    if len(found) != 1 or found[0] == 0.0:
        raise ValueError("expected one number or fraction other than 0")
    return found[0]


def _parse_constants(given: str) -> Mapping[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for item in filter(None, (part.strip() for part in given.split(";"))):
        name, has_equals, listed = (part.strip() for part in item.partition("="))
        numbers = tuple(map(_parse_number, listed.split(",")))
        if not has_equals or not all(map(math.isfinite, numbers)) or len(numbers) > MAX_CONSTANTS or name in found:
            raise ValueError("expected the values of other inputs as name=1,1;other=640,640")
        found[name] = numbers
    return found


_SIDE = whole(1, MAX_SIDE, "pixels", "the input's dims")
_ANY_NUMBERS = "one number or one per channel"


@record(frozen=True, slots=True)
class Declaration:
    """Image declaration, valid in itself but not yet checked against the model's input. None: not stated.

    A channel's value v of 0 to 255, or of a sensor, becomes (v * scale - mean) / stddev.
    """

    width: int | None = setting(None, "network_image_width", _SIDE, "width of the network's input")
    height: int | None = setting(None, "network_image_height", _SIDE, "height of the network's input")
    input_name: str | None = setting(
        None, "image_input", text_kind("name, a policy: names", "the only input"), "input that takes the image"
    )
    constants: Mapping[str, tuple[float, ...]] = setting(
        dict, "image_constants", kind_of("name=number,... separated by ;", _parse_constants, "no other inputs"),
        "values of the other inputs for each picture, as im_shape=640,640;scale_factor=1,1")  # fmt: skip
    color: Color | None = setting(
        None, "image_color", choice(Color, "rgb, or gray for one channel"), "the network's channels, in their order"
    )
    mode: FitMode = setting(
        FitMode.STRETCH, "image_fit", choice(FitMode), "how a picture of another shape becomes the input"
    )
    resize: int | None = setting(
        None, "image_resize", whole(1, MAX_SIDE, "pixels", "just cover the input"),
        "with crop: length of the shorter side before the cut")  # fmt: skip
    crop_offset: CropOffset = setting(
        CropOffset.EVEN, "image_crop_offset", choice(CropOffset),
        "with crop: how half a pixel is rounded, even as in torchvision, down as in transformers; before: the cut is "
        "made before the picture is resized, as in OpenVINO's Model API")  # fmt: skip
    pad_value: tuple[float, ...] = setting(
        (0.0,), "image_pad_value",
        _per_channel("0 to 255, one or one per channel", "whole numbers from 0 to 255", range(256).__contains__),
        "with letterbox: border colour, before image_scale")  # fmt: skip
    interpolation: Interpolation = setting(
        Interpolation.AUTO, "image_interpolation", choice(Interpolation), "how pixels are resized"
    )
    scale: float = setting(
        1.0, "image_scale", kind_of("number or fraction, as 1/255", _parse_scale), "multiplies the values 0 to 255"
    )
    mean: tuple[float, ...] = setting((0.0,), "image_mean", _per_channel(_ANY_NUMBERS), "subtracted after image_scale")
    stddev: tuple[float, ...] = setting(
        (1.0,), "image_stddev", _per_channel(_ANY_NUMBERS, "numbers other than 0", bool), "divides after image_mean"
    )
    depth_unit: DepthUnit | None = setting(
        None, "image_depth_unit", choice(DepthUnit, "the frame's unit"), "with image_color depth: unit of the input"
    )
    decode: Decode = setting(
        Decode.EXACT, "image_decode", choice(Decode), "fast: large JPEG frames are decoded at 1/2, 1/4 or 1/8"
    )
    top_k: int | None = setting(
        None, "image_top_k", whole(1, MAX_TOP_K, default=f"{DEFAULT_TOP_K}, for models with classes"),
        "number of best classes in an answer")  # fmt: skip


KEYS = (*settings_of(Declaration), *_ISAAC_FIT_KEYS, *_ISAAC_NEEDLESS_KEYS)
"""All keys about images."""


def is_declared(parameters: Mapping[str, str]) -> bool:
    """Return whether the configuration declares anything about images."""
    return any(key.startswith(_PREFIXES) for key in parameters)


def read_declaration(model: str, parameters: Mapping[str, str]) -> Declaration:
    """Return the image declaration from a model's `parameters`. Raises BadModelConfig: model, key, expected, given."""
    reader = ParameterReader(model, parameters)
    for key in _ISAAC_NEEDLESS_KEYS:
        if key in parameters:
            reader.refuse(key, "it to be left out, because each image says its own size and encoding")
    reader.check_keys(_PREFIXES, settings_of(Declaration))
    values = reader.read(Declaration)
    isaac = [key for key in _ISAAC_FIT_KEYS if key in parameters]
    if isaac:
        if "mode" in values:
            reader.refuse(isaac[0], "either image_fit or the names of Isaac ROS, not both")
        values["mode"] = _read_isaac_fit(reader)
    found = Declaration(**values)
    for key, mode in _NEEDED_FIT.items():
        if key in parameters and found.mode is not mode:
            reader.refuse(key, f"only together with image_fit {mode.value}")
    for key in ("image_mean", "image_stddev"):
        if key in parameters and "image_scale" not in parameters:
            reader.refuse(key, "image_scale beside it: 1 where its unit is 0..255, 1/255 where its unit is 0..1")
    return found


def _read_isaac_fit(reader: ParameterReader) -> FitMode:
    """Return the fit that the names of Isaac ROS state. Its defaults are true."""
    if reader.parameters.get("crop_mode", "CENTER").upper() != "CENTER":
        reader.refuse("crop_mode", "CENTER, the only cut that is offered")
    for key, without in (("keep_aspect_ratio", FitMode.STRETCH), ("enable_padding", FitMode.CROP)):
        if key in reader.parameters and not reader.parse(key, BOOLEAN):
            return without
    return FitMode.LETTERBOX
