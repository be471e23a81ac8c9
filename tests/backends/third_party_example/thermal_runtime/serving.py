"""Backend of edge_server for this runtime. A model is `curve.json`: {"gain": kelvin per count, "offset": kelvin}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from edge_server.backends.base import Array, Backend, ModelFile, ModelSignature, OpenJob, Session, SessionInfo
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, LoadError


def load_curve(file: ModelFile) -> tuple[float, float]:
    """Return gain and offset. Raises LoadError."""
    try:
        curve = json.loads(file.path.read_text())
        return float(curve["gain"]), float(curve["offset"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"model '{file.model_dir.name}': '{file.path.name}' is no curve: {error}") from None


class ThermalBackend(Backend):
    """COUNTS UINT16 [rows, pixels] -> CELSIUS FP32 [rows, pixels]."""

    default_filename = "curve.json"

    def __init__(self, name: str) -> None:
        self.name = name

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        load_curve(file)
        return ModelSignature(
            (InputSpec("COUNTS", DType.UINT16, (-1, -1)),), (OutputSpec("CELSIUS", DType.FP32, (-1, -1)),), True
        )

    def open(self, job: OpenJob) -> Session:
        return ThermalSession(job.spec.name, *load_curve(job.file))


class ThermalSession(Session):
    """One curve."""

    def __init__(self, model: str, gain: float, offset: float) -> None:
        self.info = SessionInfo("thermal 1.4", "CPU", "f32", {"gain": str(gain)})
        self._model = model
        self._gain, self._offset = np.float32(gain), np.float32(offset - 273.15)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if not inputs["COUNTS"].size:
            raise BackendError(f"model '{self._model}': COUNTS has no pixels")
        return dict.fromkeys(outputs, inputs["COUNTS"] * self._gain + self._offset)

    def close(self) -> None:
        """Nothing is held."""
