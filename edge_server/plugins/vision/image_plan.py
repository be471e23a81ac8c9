"""Conversion of images to the input tensor of one model: size, colours, number type, layout; computed once from its
configuration.

`image_parameters` declares the keys. This module checks them against the input's layout, size and data type.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.vision.compressed_frames import read_compressed
from edge_server.plugins.vision.decode import decode_image
from edge_server.plugins.vision.image_parameters import (
    MAX_SIDE,
    CropOffset,
    Declaration,
    Decode,
    is_declared,
    read_declaration,
)
from edge_server.plugins.vision.outputs.output_tensors import shape_matches
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.pixel_values import ByteValues, DepthValues, cast_exactly, zero_not_finite
from edge_server.plugins.vision.raw_encodings import pixels
from edge_server.plugins.vision.resize import (
    Color,
    FitRule,
    FittedPicture,
    Interpolation,
    ResizedPicture,
    channel_order,
    make_fitted_picture,
    place,
    resized,
    to_gray,
)
from edge_server.protocol.frame_messages import Frame
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

IMAGE_TYPES = (
    DType.UINT8,
    DType.INT8,
    DType.UINT16,
    DType.INT16,
    DType.INT32,
    DType.FP16,
    DType.BF16,
    DType.FP32,
)
"""Input data types that an image can be written to."""

_NO_IMAGE_PARAMETERS = (
    "its configuration has no parameters 'image_...' or 'network_image_...' that say how an image becomes its input; "
    "a config.pbtxt that edge-server add wrote has those that may fit as comments"
)
"""Why a model without an image plan takes no images."""


class DimensionOrder(enum.Enum):
    """Order of an image input's dimensions, without the batch. HW is one channel without a channel dimension."""

    CHW = "channels, height, width"
    HWC = "height, width, channels"
    HW = "height, width"

    @property
    def rank(self) -> int:
        return 2 if self is DimensionOrder.HW else 3


@record(frozen=True, slots=True)
class ImagePlan:
    """Converts any picture to one item of the input `input_name`. Immutable and thread-safe.

    `shape` is the tensor's shape, with a leading 1 if it has a batch dimension. `values` converts pixel values; `pad`
    is the border colour before that conversion. `is_decode_exact` is false if JPEG frames may be decoded at a fraction
    of their size. `top_k` is the number of best labels to return for an image request, None if not configured.
    `constants` are the model's other inputs for one picture.
    """

    input_name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: DimensionOrder
    color: Color
    rule: FitRule
    values: ByteValues | DepthValues
    pad: tuple[int, ...]
    is_decode_exact: bool
    top_k: int | None
    constants: tuple[Tensor, ...] = ()

    def inputs(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return all inputs of the model for the pictures of `tensor`: itself, and those with constant values."""
        found = {tensor.name: tensor}
        for one in self.constants:
            array = one.array
            if len(self.shape) > self.layout.rank and len(tensor.array) != 1:
                array = np.repeat(array, len(tensor.array), axis=0)
            found[one.name] = Tensor(one.name, one.dtype, array)
        return found

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of one picture within a batch."""
        return self.shape[1:] if len(self.shape) > self.layout.rank else self.shape

    def tensor(self, data: bytes | memoryview, *, model: str) -> Tensor:
        """Return the tensor of `fit_file`. It owns its memory."""
        return self.fit_file(data, model=model)[0]

    def fit_file(self, data: bytes | memoryview, *, model: str) -> tuple[Tensor, FittedPicture]:
        """Decode a JPEG, PNG, BMP or WebP file and fit it. Returns the tensor and the mapping of `write`.

        Raises InvalidRequest for another format and for a truncated, damaged or too large image, and Unsupported if
        OpenCV is not installed.
        """
        # Cast to bytes, because a caller's view may have larger items.
        view = memoryview(data).cast("B")
        if self.color is Color.DEPTH:
            picture = read_compressed(
                view, "", color=self.color, shrinks_to=None, error_prefix=self._error_prefix(model)
            )
            return self.fit(picture.pixels, picture.color, model=model)
        is_gray = self.color is Color.GRAY
        image = decode_image(view, as_gray=is_gray, error_prefix=self._error_prefix(model))
        return self.fit(image, Color.GRAY if is_gray else Color.BGR, model=model)

    def fit(self, image: npt.NDArray[np.generic], color: Color, *, model: str) -> tuple[Tensor, FittedPicture]:
        """Fit decoded pixels, `(height, width, 3)`, or `(height, width)` for gray and depth, into a new tensor.

        Returns the tensor and the mapping of `write`. Raises the errors of `write`.
        """
        array = np.empty(self.shape, self.dtype.numpy)
        fit = self.write(Picture(image, color), array.reshape(self.item_shape), model=model)
        return Tensor(self.input_name, self.dtype, array), fit

    def read_frame(self, frame: Frame, data: memoryview, *, model: str, is_drawn: bool = False) -> Picture:
        """Return the picture of a camera frame with the bytes `data`; for raw frames often a view of them.

        `is_drawn`: results are drawn into the picture, so a file is decoded in full size, and in colour for a network
        that takes gray. Raises InvalidRequest for a frame that contradicts itself or its format, or has a kind (colour,
        depth) that the model does not take, and Unsupported for an unsupported codec or if OpenCV is not installed.
        """
        error_prefix = self._error_prefix(model)
        # Drivers send files without a format. They have no size beside the one in the file.
        is_file = not (frame.encoding or frame.height or frame.width)
        if bool(frame.format) == bool(frame.encoding) and not is_file:
            given = f"both ('{frame.encoding[:40]}', '{frame.format[:40]}')" if frame.format else "none"
            raise InvalidRequest(
                f"{error_prefix}: expected either an encoding (raw) or a format (a file), given {given}"
            )
        if frame.format or is_file:
            # Copy shared memory: the file must not change between the check of its header and the decoding.
            view = memoryview(bytes(data)) if frame.region else data.cast("B")
            color = Color.BGR if is_drawn and self.color is Color.GRAY else self.color
            shrinks_to = None if is_drawn or self.is_decode_exact else self.rule
            picture = read_compressed(view, frame.format, color=color, shrinks_to=shrinks_to, error_prefix=error_prefix)
        else:
            picture = pixels(
                frame.height,
                frame.width,
                frame.encoding,
                frame.step,
                frame.is_bigendian,
                data,
                error_prefix=error_prefix,
            )
        self._check_kind(picture, error_prefix)
        return picture

    def write(self, picture: Picture, item: npt.NDArray[np.generic], *, model: str) -> FittedPicture:
        """Fit a picture into `item`, which has `item_shape` and the input's type and is C-contiguous.

        Sets all elements. Returns the mapping between frame and input coordinates. Raises InvalidRequest for a kind of
        picture that the model does not take, or an aspect ratio too extreme to cut (see `resize.resized`).
        """
        if item.shape != self.item_shape or item.dtype != self.dtype.numpy or not item.flags.c_contiguous:
            raise ValueError(
                f"expected an item of {self.item_shape} {self.dtype.numpy}, given {item.shape} {item.dtype}"
            )
        error_prefix = self._error_prefix(model)
        self._check_kind(picture, error_prefix)
        placement = place(self.rule, picture.width, picture.height)
        if isinstance(self.values, DepthValues):
            self._write_depth(picture, placement, item, error_prefix)
        else:
            self._write_colors(picture, placement, item, error_prefix)
        return make_fitted_picture(placement, picture.width, picture.height)

    def _write_colors(
        self, picture: Picture, placement: ResizedPicture, item: npt.NDArray[np.generic], error_prefix: str
    ) -> None:
        assert isinstance(self.values, ByteValues)
        color = picture.color
        visible = resized(picture.eight_bits(), placement, self.rule, error_prefix)
        if self.color is Color.GRAY and color is not Color.GRAY:
            visible, color = to_gray(visible, color), Color.GRAY
        order = channel_order(color, self.color)
        window = self._window(item, placement, visible.shape)
        if self.layout is DimensionOrder.HWC:
            self.values.write_hwc(visible, order, window.transpose(1, 2, 0))
        else:
            self.values.write_chw(visible, order, window)

    def _write_depth(
        self, picture: Picture, placement: ResizedPicture, item: npt.NDArray[np.generic], error_prefix: str
    ) -> None:
        assert isinstance(self.values, DepthValues)
        numbers = picture.pixels
        if self.rule.interpolation is not Interpolation.NEAREST:
            # Interpolation must not spread a missing measurement to its neighbours.
            numbers = zero_not_finite(numbers)
        visible = resized(numbers, placement, self.rule, error_prefix)
        self.values.write(visible, self._window(item, placement, visible.shape)[0])

    def _window(
        self, item: npt.NDArray[np.generic], placement: ResizedPicture, size: tuple[int, ...]
    ) -> npt.NDArray[np.generic]:
        """Fill the borders around a picture of that size; return the view `(channels, height, width)` for it."""
        height, width = self.rule.height, self.rule.width
        top, left = max(0, placement.top), max(0, placement.left)
        bottom, right = top + size[0], left + size[1]
        has_border = (bottom - top, right - left) != (height, width)
        window: npt.NDArray[np.generic]
        if self.layout is DimensionOrder.HWC:
            if has_border:
                # Whole lines of numbers: assigning three at a time is several times slower.
                lines, n = item.reshape(height, -1), item.shape[2]
                _fill_around(lines, np.tile(self.values.border(self.pad), width), (top, bottom), (left * n, right * n))
            window = item[top:bottom, left:right].transpose(2, 0, 1)
            return window
        planes = item.reshape(-1, height, width)
        if has_border:
            for plane, value in zip(planes, self.values.border(self.pad), strict=True):
                _fill_around(plane, value, (top, bottom), (left, right))
        window = planes[:, top:bottom, left:right]
        return window

    def _check_kind(self, picture: Picture, error_prefix: str) -> None:
        if self.color is Color.DEPTH and picture.pixels.ndim != 2:
            raise InvalidRequest(f"{error_prefix}: expected depth (16UC1, 32FC1, mono16), given colour")
        if self.color is not Color.DEPTH and picture.color is Color.DEPTH:
            raise InvalidRequest(
                f"{error_prefix}: expected colour or gray, given depth "
                f"({picture.pixels.dtype} numbers of one channel); a model that takes depth declares "
                "image_color depth, and gray of 16 bits is named mono16"
            )

    def _error_prefix(self, model: str) -> str:
        return f"model '{model}', image for input '{self.input_name}'"


def _fill_around(
    plane: npt.NDArray[np.generic], line: npt.NDArray[np.generic], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Fill `plane` outside a window with `line`: one value, or one value per column."""
    top, bottom = rows
    left, right = columns
    plane[:top] = line
    plane[bottom:] = line
    plane[top:bottom, :left] = line[:left] if line.ndim else line
    plane[top:bottom, right:] = line[right:] if line.ndim else line


def make_image_plan(spec: ModelSpec) -> ImagePlan | None:
    """Return the image plan of a model, or None if its configuration declares nothing about images, or several inputs
    for them.

    Takes about a microsecond without a declaration and a fraction of a millisecond with one: call it once per version.
    Raises BadModelConfig if the declaration is wrong in itself or does not match the input.
    """
    plans = make_image_plans(spec)
    return plans[0] if len(plans) == 1 else None


def required_image_plan(spec: ModelSpec, images: str) -> ImagePlan:
    """Return the image plan of a model that gets `images`, as messages call them. Raises InvalidRequest if it has
    none."""
    try:
        plan = make_image_plan(spec)
    except BadModelConfig as error:
        raise InvalidRequest(f"model '{spec.name}' cannot take {images}: {error.message}") from None
    if plan is None:
        raise InvalidRequest(
            f"model '{spec.name}' does not take {images}: {_NO_IMAGE_PARAMETERS}{spec.unrecognised_note}"
        )
    return plan


def make_image_plans(spec: ModelSpec) -> tuple[ImagePlan, ...]:
    """Return the image plan of each input that takes a picture. Raises the errors of `make_image_plan`."""
    parameters = spec.all_parameters
    if not is_declared(parameters):
        return ()
    declaration = read_declaration(spec.name, parameters)
    return tuple(_Planner(spec, declaration, target).plan() for target in _inputs_of(spec, declaration))


def _inputs_of(spec: ModelSpec, declaration: Declaration) -> list[InputSpec]:
    others = [given for given in spec.inputs if given.name not in declaration.constants]
    if declaration.input_name is None and len(others) == 1:
        return others
    names: list[str | None] = [declaration.input_name]
    if declaration.input_name is not None and spec.input(declaration.input_name) is None:
        # Only now, as a name of an input may have a comma.
        names = [name.strip() for name in declaration.input_name.split(",")]
    found: list[InputSpec] = []
    for name in names:
        target = None if name is None else spec.input(name)
        if target is None or target in found:
            known = ", ".join(f"'{given.name}'" for given in spec.inputs)
            raise BadModelConfig(
                f"model '{spec.name}', parameter 'image_input': expected the name of the input that takes the image, "
                f"one of {known}, given {'nothing' if name is None else repr(name)}"
            )
        found.append(target)
    return found


@record(frozen=True, slots=True)
class _Planner:
    """Checks a declaration against its input and makes the plan. Raises BadModelConfig for a mismatch."""

    spec: ModelSpec
    declaration: Declaration
    target: InputSpec

    def plan(self) -> ImagePlan:
        if self.target.dtype not in IMAGE_TYPES:
            self._refuse(f"a data type out of {', '.join(t.value for t in IMAGE_TYPES)}", self.target.dtype.value)
        dims = self._picture_dims()
        layout = self._layout(dims)
        color = self._color(1 if layout is DimensionOrder.HW else dims[0 if layout is DimensionOrder.CHW else 2])
        at = 1 if layout is DimensionOrder.CHW else 0
        height = self._side("network_image_height", self.declaration.height, dims[at])
        width = self._side("network_image_width", self.declaration.width, dims[at + 1])
        channels = 1 if color in (Color.GRAY, Color.DEPTH) else 3
        picture = {
            DimensionOrder.CHW: (channels, height, width),
            DimensionOrder.HWC: (height, width, channels),
            DimensionOrder.HW: (height, width),
        }[layout]
        rule = self._rule(width, height, color)
        needs_pixels = rule.interpolation.is_antialiased or rule.interpolation is Interpolation.NEAREST
        has_leading_one = self.spec.max_batch_size > 0 or len(self.target.dims) > len(dims)
        return ImagePlan(
            input_name=self.target.name,
            dtype=self.target.dtype,
            shape=(1, *picture) if has_leading_one else picture,
            layout=layout,
            color=color,
            rule=rule,
            values=self._depth_values() if color is Color.DEPTH else self._byte_values(channels),
            pad=tuple(int(v) for v in self._per_channel("image_pad_value", self.declaration.pad_value, channels)),
            is_decode_exact=self.declaration.decode is Decode.EXACT or needs_pixels,
            top_k=self.declaration.top_k,
            constants=tuple(self._constant(*item, height, width) for item in self.declaration.constants.items()),
        )

    def _constant(self, name: str, values: tuple[float, ...], height: int, width: int) -> Tensor:
        """Return another input for one picture. One value fills a mask of the picture's height and width."""
        item = self.spec.input(name)
        if item is None or item is self.target or item.dtype.numpy.kind not in "fiu":
            names = ", ".join(f"'{other.name}'" for other in self.spec.inputs if other is not self.target) or "none"
            raise BadModelConfig(
                f"model '{self.spec.name}', parameter 'image_constants': expected names of inputs with numbers beside "
                f"the image, of {names}, given '{name[:60]}'"
            )
        dims = item.dims
        if self.spec.max_batch_size == 0 and dims[:1] in ((1,), (-1,)):
            dims = dims[1:]
        shape = (height, width) if len(values) == 1 and len(dims) == 2 else (len(values),) if dims else ()
        if not shape_matches(dims, shape):
            raise BadModelConfig(
                f"model '{self.spec.name}', parameter 'image_constants': expected values for '{name}' {list(dims)}, "
                f"given {len(values)}"
            )
        leading = (1,) if self.spec.max_batch_size > 0 or len(item.dims) > len(dims) else ()
        array = np.empty((*leading, *shape), item.dtype.numpy)
        array[...] = np.asarray(values if len(shape) == 1 else values[0]).astype(item.dtype.numpy)
        return Tensor(name, item.dtype, array)

    def _refuse(self, expected: str, given: object) -> NoReturn:
        raise BadModelConfig(
            f"model '{self.spec.name}', image for input '{self.target.name}': expected {expected}, given {given}"
        )

    def _picture_dims(self) -> tuple[int, ...]:
        """Return the dims without a batch dimension, which max_batch_size or a leading 1 or -1 declares."""
        dims = self.target.dims
        if self.spec.max_batch_size == 0 and len(dims) == 4 and dims[0] in (1, -1):
            return dims[1:]
        if len(dims) not in (2, 3):
            self._refuse("dims of a picture (height, width and 1 or 3 channels)", list(dims))
        return dims

    def _layout(self, dims: tuple[int, ...]) -> DimensionOrder:
        if len(dims) == 2:
            return DimensionOrder.HW
        if self.target.format != "FORMAT_NONE":
            return DimensionOrder.CHW if self.target.format == "FORMAT_NCHW" else DimensionOrder.HWC
        is_planar, is_packed = dims[0] in (1, 3), dims[2] in (1, 3)
        if is_planar == is_packed:
            self._refuse("format FORMAT_NCHW or FORMAT_NHWC stated, as its dims do not tell", list(dims))
        return DimensionOrder.CHW if is_planar else DimensionOrder.HWC

    def _color(self, channels: int) -> Color:
        if channels not in (1, 3):
            self._refuse("3 channels, or 1 for gray", f"{channels} in dims {list(self.target.dims)}")
        color = self.declaration.color or (Color.GRAY if channels == 1 else Color.RGB)
        if (color in (Color.GRAY, Color.DEPTH)) != (channels == 1):
            self._refuse(
                f"image_color {'gray or depth' if channels == 1 else 'rgb or bgr'} for {channels} channels", color.value
            )
        if self.declaration.depth_unit and color is not Color.DEPTH:
            self._refuse("image_depth_unit only together with image_color depth", color.value)
        return color

    def _side(self, key: str, declared: int | None, dim: int) -> int:
        if dim == -1 and declared is None:
            self._refuse(f"{key} stated, as dims leave it open", list(self.target.dims))
        if dim != -1 and declared not in (None, dim):
            self._refuse(f"{key} {dim}, as dims {list(self.target.dims)} say", declared)
        side = dim if declared is None else declared
        if not 1 <= side <= MAX_SIDE:
            self._refuse(f"sides from 1 to {MAX_SIDE}", side)
        return side

    def _rule(self, width: int, height: int, color: Color) -> FitRule:
        resize = self.declaration.resize
        if resize is not None and resize < max(width, height):
            self._refuse(f"image_resize of at least {max(width, height)}, to cut out {width}x{height}", resize)
        interpolation = self.declaration.interpolation
        if color is Color.DEPTH and interpolation is Interpolation.AUTO:
            # The mean of a near and a far surface is the depth of neither.
            interpolation = Interpolation.NEAREST
        offset = self.declaration.crop_offset
        cuts_down, cuts_first = offset is CropOffset.DOWN, offset is CropOffset.BEFORE
        if cuts_first and resize is not None:
            self._refuse("no image_resize together with image_crop_offset before", resize)
        return FitRule(self.declaration.mode, width, height, resize, interpolation, cuts_down, cuts_first)

    def _per_channel(self, key: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
        if len(values) == 1:
            return values * channels
        if len(values) != channels:
            self._refuse(f"{key} with one number, or one for each of {channels} channels", f"{len(values)} numbers")
        return values

    def _byte_values(self, channels: int) -> ByteValues:
        mean = np.array(self._per_channel("image_mean", self.declaration.mean, channels))[:, None]
        stddev = np.array(self._per_channel("image_stddev", self.declaration.stddev, channels))[:, None]
        with np.errstate(over="ignore"):
            values = (np.arange(256.0) * self.declaration.scale - mean) / stddev
            table = cast_exactly(values, self.target.dtype)
        if table is None:
            self._refuse(
                f"image_scale, image_mean and image_stddev to give values that {self.target.dtype.value} holds",
                f"{values.min():g} to {values.max():g}",
            )
        return ByteValues(table)

    def _depth_values(self) -> DepthValues:
        (mean,) = self._per_channel("image_mean", self.declaration.mean, 1)
        (stddev,) = self._per_channel("image_stddev", self.declaration.stddev, 1)
        scale = self.declaration.scale
        # Leaves room for a factor of 1000 between units.
        if max(abs(scale / stddev), abs(mean / stddev)) > float(np.finfo(np.float32).max) / 1000:
            self._refuse("image_scale, image_mean and image_stddev that FP32 holds", f"{scale:g}, {mean:g}, {stddev:g}")
        return DepthValues(self.target.dtype, scale, mean, stddev, self.declaration.depth_unit)
