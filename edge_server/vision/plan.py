"""How images become the input of one model, settled once from its configuration.

`declaration` documents the keys; here they meet the model's input: its layout, size and data type.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from edge_server.core.model import InputSpec, ModelSpec
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BadModelConfig
from edge_server.vision.declaration import MAX_SIDE, Declaration, is_declared, read_declaration
from edge_server.vision.decode import decode_image
from edge_server.vision.fit import (
    Color,
    Fit,
    FitRule,
    channel_order,
    fit_of,
    place,
    resized,
    to_gray,
    write_channels,
)

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
"""Types of input that an image can be written to."""


class Layout(enum.Enum):
    """Order of an image input's dimensions, without the batch; PLAIN is one gray channel without a dimension."""

    PLANAR = "channels, height, width"
    PACKED = "height, width, channels"
    PLAIN = "height, width"


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What turns any picture into one row for `input_name`. Immutable, usable from any thread.

    `shape` is the tensor's, with a leading 1 when the model batches. `table[c, v]` is what channel c of the network
    gets where the picture has v (BF16 as bit patterns), `pad[c]` the border's v. `top_k` is how many best labels
    answer an image request, None where the configuration does not say.
    """

    input_name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: Layout
    color: Color
    rule: FitRule
    table: npt.NDArray[np.generic] = field(repr=False, compare=False)
    pad: tuple[int, ...]
    top_k: int | None

    def tensor(self, data: bytes | memoryview, *, model: str) -> Tensor:
        """Decode a JPEG, PNG, BMP or WebP file and fit it. The tensor owns its memory; `data` may go at once.

        Raises InvalidRequest for what is not such an image, is truncated, damaged or too large, and Unsupported where
        OpenCV is not installed.
        """
        is_gray = self.color is Color.GRAY
        # A cast to bytes, because a caller's view may count in larger items.
        view = memoryview(data).cast("B")
        image = decode_image(view, as_gray=is_gray, subject=self._subject(model))
        return self.fit(image, Color.GRAY if is_gray else Color.BGR, model=model)[0]

    def fit(self, image: npt.NDArray[np.uint8], color: Color, *, model: str) -> tuple[Tensor, Fit]:
        """Fit decoded pixels: `(height, width, 3)`, or `(height, width)` for gray, rows possibly padded.

        Returns the tensor and the mapping between coordinates of the picture and of the input. Raises InvalidRequest
        for a picture whose sides are too unlike to be cut (see `fit.resized`).
        """
        height, width = image.shape[:2]
        placement = place(self.rule, width, height)
        visible = resized(image, placement, self.rule, self._subject(model))
        if self.color is Color.GRAY and color is not Color.GRAY:
            visible, color = to_gray(visible, color), Color.GRAY
        array = np.empty(self.shape, self.dtype.numpy)
        planes = self._planes(array)
        if visible.shape[:2] != planes.shape[1:]:
            for channel, value in enumerate(self.pad):
                planes[channel] = self.table[channel, value]
        corner = (max(0, placement.left), max(0, placement.top))
        write_channels(visible, channel_order(color, self.color), self.table, planes, corner)
        return Tensor(self.input_name, self.dtype, array), fit_of(placement, width, height)

    def _planes(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Return a view of the tensor's array as `(channels, height, width)`."""
        height, width = self.rule.height, self.rule.width
        planes: npt.NDArray[np.generic]
        if self.layout is Layout.PACKED:
            planes = array.reshape(height, width, -1).transpose(2, 0, 1)
        else:
            planes = array.reshape(-1, height, width)
        return planes

    def _subject(self, model: str) -> str:
        return f"model '{model}', image for input '{self.input_name}'"


def image_plan(spec: ModelSpec) -> ImagePlan | None:
    """Return how images reach that model, or None when its configuration declares nothing about images.

    Costs about a microsecond without a declaration and a fraction of a millisecond with one: make it once a version.
    Raises BadModelConfig when the declaration is wrong in itself or does not suit the input.
    """
    if not is_declared(spec.parameters):
        return None
    declaration = read_declaration(spec.name, spec.parameters)
    return _Planner(spec, declaration, _input_of(spec, declaration.input_name)).plan()


def _input_of(spec: ModelSpec, name: str | None) -> InputSpec:
    names = ", ".join(f"'{given.name}'" for given in spec.inputs)
    if name is None and len(spec.inputs) == 1:
        return spec.inputs[0]
    found = None if name is None else spec.input(name)
    if found is None:
        given = "nothing" if name is None else f"'{name}'"
        raise BadModelConfig(
            f"model '{spec.name}', parameter 'image_input': expected the name of the input that takes the image, one "
            f"of {names}, given {given}"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Planner:
    """Brings a declaration and the input it is for together, refusing what does not fit."""

    spec: ModelSpec
    declaration: Declaration
    target: InputSpec

    def plan(self) -> ImagePlan:
        if self.target.dtype not in IMAGE_TYPES:
            self._refuse(f"a data type out of {', '.join(t.value for t in IMAGE_TYPES)}", self.target.dtype.value)
        dims = self._picture_dims()
        layout = self._layout(dims)
        color = self._color(1 if layout is Layout.PLAIN else dims[0 if layout is Layout.PLANAR else 2])
        at = 1 if layout is Layout.PLANAR else 0
        height = self._side("network_image_height", self.declaration.height, dims[at])
        width = self._side("network_image_width", self.declaration.width, dims[at + 1])
        channels = 1 if color is Color.GRAY else 3
        picture = {
            Layout.PLANAR: (channels, height, width),
            Layout.PACKED: (height, width, channels),
            Layout.PLAIN: (height, width),
        }[layout]
        has_leading_one = self.spec.max_batch_size > 0 or len(self.target.dims) > len(dims)
        return ImagePlan(
            input_name=self.target.name,
            dtype=self.target.dtype,
            shape=(1, *picture) if has_leading_one else picture,
            layout=layout,
            color=color,
            rule=self._rule(width, height),
            table=self._table(channels),
            pad=tuple(int(v) for v in self._per_channel("image_pad_value", self.declaration.pad_value, channels)),
            top_k=self.declaration.top_k,
        )

    def _refuse(self, expected: str, given: object) -> NoReturn:
        raise BadModelConfig(
            f"model '{self.spec.name}', image for input '{self.target.name}': expected {expected}, given {given}"
        )

    def _picture_dims(self) -> tuple[int, ...]:
        """Return the dims without a batch dimension, declared (max_batch_size) or written out as a leading 1 or -1."""
        dims = self.target.dims
        if self.spec.max_batch_size == 0 and len(dims) == 4 and dims[0] in (1, -1):
            return dims[1:]
        if len(dims) not in (2, 3):
            self._refuse("dims of a picture (height, width and 1 or 3 channels)", list(dims))
        return dims

    def _layout(self, dims: tuple[int, ...]) -> Layout:
        if len(dims) == 2:
            return Layout.PLAIN
        if self.target.format != "FORMAT_NONE":
            return Layout.PLANAR if self.target.format == "FORMAT_NCHW" else Layout.PACKED
        is_planar, is_packed = dims[0] in (1, 3), dims[2] in (1, 3)
        if is_planar == is_packed:
            self._refuse("format FORMAT_NCHW or FORMAT_NHWC stated, as its dims do not tell", list(dims))
        return Layout.PLANAR if is_planar else Layout.PACKED

    def _color(self, channels: int) -> Color:
        if channels not in (1, 3):
            self._refuse("3 channels, or 1 for gray", f"{channels} in dims {list(self.target.dims)}")
        color = self.declaration.color or (Color.GRAY if channels == 1 else Color.RGB)
        if (color is Color.GRAY) != (channels == 1):
            self._refuse(
                f"image_color {'gray' if channels == 1 else 'rgb or bgr'} for {channels} channels", color.value
            )
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

    def _rule(self, width: int, height: int) -> FitRule:
        resize = self.declaration.resize
        if resize is not None and resize < max(width, height):
            self._refuse(f"image_resize of at least {max(width, height)}, to cut out {width}x{height}", resize)
        return FitRule(self.declaration.mode, width, height, resize, self.declaration.interpolation)

    def _per_channel(self, key: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
        if len(values) == 1:
            return values * channels
        if len(values) != channels:
            self._refuse(f"{key} with one number, or one for each of {channels} channels", f"{len(values)} numbers")
        return values

    def _table(self, channels: int) -> npt.NDArray[np.generic]:
        """Return what each of 256 values becomes in each channel: computed in double precision, rounded once."""
        mean = np.array(self._per_channel("image_mean", self.declaration.mean, channels))[:, None]
        stddev = np.array(self._per_channel("image_stddev", self.declaration.stddev, channels))[:, None]
        with np.errstate(over="ignore"):
            values = (np.arange(256.0) * self.declaration.scale - mean) / stddev
            table = _cast(values, self.target.dtype)
        if table is None:
            self._refuse(
                f"image_scale, image_mean and image_stddev to give values that {self.target.dtype.value} holds",
                f"{values.min():g} to {values.max():g}",
            )
        return table


def _cast(values: npt.NDArray[np.float64], dtype: DType) -> npt.NDArray[np.generic] | None:
    """Return `values` as `dtype`, rounded to nearest (ties to even); None when some do not fit."""
    if dtype is DType.BF16:
        bits = values.astype(np.float32).view(np.uint32)
        # Adding 0x7FFF, and 1 more where the kept part is odd, carries into the upper half just where it must.
        kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return kept.astype(np.uint16) if bool((kept & 0x7F80 != 0x7F80).all()) else None
    if dtype.numpy.kind == "f":
        narrowed = values.astype(dtype.numpy)
        return narrowed if bool(np.isfinite(narrowed).all()) else None
    limits = np.iinfo(str(dtype.numpy))
    rounded = np.rint(values)
    if not bool(((rounded >= limits.min) & (rounded <= limits.max)).all()):
        return None
    return rounded.astype(dtype.numpy)
