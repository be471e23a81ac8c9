"""Priority classes (control, normal, bulk) of models and requests: an overheated machine rejects the lowest class
first."""

from __future__ import annotations

import enum

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig

CLASS_PARAMETER = "priority_class"
"""Key in the parameters of config.pbtxt: control, normal or bulk, for requests and frames without a priority."""


class PriorityClass(enum.IntEnum):
    """The value is the order: control before normal before bulk."""

    CONTROL = 1
    NORMAL = 2
    BULK = 3

    @classmethod
    def of_priority(cls, priority: int) -> PriorityClass:
        """Return the class of a request's or stream's priority: 1 is control, 0 and 2 are normal, all others bulk."""
        if priority == 1:
            return cls.CONTROL
        return cls.NORMAL if priority in (0, 2) else cls.BULK


def priority_class(spec: ModelSpec) -> PriorityClass:
    """Return the class that a model declares, by default normal. Raises BadModelConfig."""
    text = spec.parameters.get(CLASS_PARAMETER, "normal").strip().upper()
    if text not in PriorityClass.__members__:
        raise BadModelConfig(
            f"model '{spec.name}', parameter '{CLASS_PARAMETER}': "
            f"expected control, normal or bulk, given '{text.lower()}'"
        )
    return PriorityClass[text]
