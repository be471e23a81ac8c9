"""Runs on a GPU with I/O binding: results stay on the device until the last one is there, then come back at once.

Without it onnxruntime waits for the device at each output. On the CPU it gains nothing, see the class's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import Array

_HOST_ONLY = frozenset(("tensor(string)", "tensor(bfloat16)"))
"""Types that numpy lacks, or that devices do: models with one run without binding."""


class BoundRun:
    """One InferenceSession that nobody else runs, with one binding that is used for run after run.

    Inputs are copied to the device by onnxruntime as it begins. `device` is "cuda" but for tests, which bind to "cpu".
    """

    def __init__(self, session: Any, run_options: Any, device: str, device_id: int) -> None:
        self._session = session
        self._run_options = run_options
        self._device = device
        self._device_id = device_id
        self._binding = session.io_binding()

    @classmethod
    def of(cls, session: Any, run_options: Any, device: str, device_id: int | None) -> BoundRun | None:
        """Return what runs the session; None where it is not on a GPU, or has tensors that cannot be bound."""
        nodes = (*session.get_inputs(), *session.get_outputs())
        if device_id is None or any(node.type in _HOST_ONLY or "tensor" not in node.type for node in nodes):
            return None
        return cls(session, run_options, device, device_id)

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the order named, as arrays of the host's that belong to the caller.

        Raises what onnxruntime raises; nothing of a failed run stays bound.
        """
        binding = self._binding
        try:
            for name, array in feeds.items():
                binding.bind_cpu_input(name, array)
            for name in outputs:
                binding.bind_output(name, self._device, self._device_id)
            self._session.run_with_iobinding(binding, self._run_options)
            arrays: list[Array] = binding.copy_outputs_to_cpu()
            if self._device == "cpu":
                # Nothing was copied: the arrays are the binding's own.
                arrays = [np.array(array) for array in arrays]
            return arrays
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()
