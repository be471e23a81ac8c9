"""Tensor that also carries parsed JSON: the front end has parsed the text already, so the model need not parse it
again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.tensor import DType, Tensor

if TYPE_CHECKING:
    import numpy.typing as npt


class JsonTensor(Tensor):
    """A BYTES tensor of one element, the JSON text of `value`. Code that knows it reads `value`, which it must not
    change. For all other code, `array` writes the text at the first read. It is pickled as the value."""

    __slots__ = ("_array", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.dtype = DType.BYTES
        self.value = value
        self._array: npt.NDArray[np.generic] | None = None

    @property
    def array(self) -> npt.NDArray[np.generic]:  # type: ignore[override]  # the base class has a plain attribute
        """The text in UTF-8, of shape (1,)."""
        array = self._array
        if array is None:
            array = np.empty(1, object)
            array[0] = json.dumps(self.value).encode()
            self._array = array
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    @property
    def nbytes(self) -> int:
        """As of any array with one element of BYTES: the size of a reference."""
        return DType.BYTES.numpy.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonTensor, (self.name, self.value)
