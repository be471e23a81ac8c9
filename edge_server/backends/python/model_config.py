"""pb_utils.ModelConfig: the configuration object for `auto_complete_config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_UNSET: tuple[object, ...] = (None, "TYPE_INVALID", [], "")


class ModelConfig:
    """Takes from the model what its configuration leaves out. What both state must agree; ValueError says where not."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """State the largest batch; the configuration may state a smaller one already."""
        stated = self._config.get("max_batch_size", 0)
        if stated > max_batch_size:
            raise self._wrong(f"max_batch_size: the configuration states {stated}, the model at most {max_batch_size}")
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if self._config.get(other):
                raise self._wrong(f"the model sets dynamic_batching, the configuration states {other}")
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input: {"name", "data_type", "dims"} and perhaps "optional"."""
        self._add("input", input, ("name", "data_type", "dims"), ("optional",))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: {"name", "data_type", "dims"}."""
        self._add("output", output, ("name", "data_type", "dims"), ())

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """State {"decoupled": true or false}."""
        self._check_keys("model_transaction_policy", transaction_policy_dict, (), ("decoupled",))
        policy = self._config.setdefault("model_transaction_policy", {})
        given = transaction_policy_dict.get("decoupled", False)
        if policy.get("decoupled") and not given:
            raise self._wrong("the configuration states model_transaction_policy decoupled, the model not decoupled")
        policy["decoupled"] = given

    def _add(self, kind: str, given: Mapping[str, Any], needed: tuple[str, ...], allowed: tuple[str, ...]) -> None:
        self._check_keys(kind, given, needed, allowed)
        items = self._config.setdefault(kind, [])
        for item in items:
            if item.get("name") != given["name"]:
                continue
            for key in (*needed, *allowed):
                stated = item.get(key)
                if key in given and stated not in _UNSET and stated is not False and stated != given[key]:
                    raise self._wrong(
                        f"{kind} '{given['name']}' {key}: the configuration states {stated}, the model {given[key]}"
                    )
            item.update(given)
            return
        items.append(dict(given))

    def _check_keys(
        self, what: str, given: Mapping[str, Any], needed: tuple[str, ...], allowed: tuple[str, ...]
    ) -> None:
        name = f" '{given['name']}'" if "name" in given else ""
        missing = [key for key in needed if key not in given]
        strange = [key for key in given if key not in (*needed, *allowed)]
        if missing or strange:
            expected = ", ".join((*needed, *allowed))
            raise self._wrong(f"{what}{name}: expected the keys {expected}, given {', '.join(given) or 'none'}")

    def _wrong(self, text: str) -> ValueError:
        return ValueError(f"auto_complete_config of model '{self._config.get('name', '')}': {text}")
