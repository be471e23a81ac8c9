"""Settings of loading and unloading, per server and per model: retries, number of models in memory, when to reload,
and after how long a run counts as hung."""

from __future__ import annotations

import math
from typing import NamedTuple

from edge_server.core.model_spec import ModelSpec
from edge_server.core.version_lifecycle import ReloadPolicy
from edge_server.errors import BadModelConfig
from edge_server.serving.execution.latencies import NO_LATENCIES, LatencyOptions


class LifecycleSettings(NamedTuple):
    """`load_retry_count`: how often a load that failed for good is retried at once. `reload_policy`: for models without
    their own. `max_resident_models` 0: any number. `idle_unload_s` 0: idle models stay loaded. `on_demand_timeout_s`:
    how long a request waits for its model to be loaded. `hang_timeout_s` 0: runs may take any time. `latencies`: what
    each version records for metrics beside its counters."""

    load_retry_count: int = 0
    reload_policy: ReloadPolicy = ReloadPolicy.OVERLAP
    max_resident_models: int = 0
    idle_unload_s: float = 0.0
    on_demand_timeout_s: float = 60.0
    hang_timeout_s: float = 0.0
    latencies: LatencyOptions = NO_LATENCIES

    def idle_unload_s_of(self, spec: ModelSpec) -> float:
        """Return the model's own time, its parameter `idle_unload_s`, or the server's; 0: never. Raises
        BadModelConfig."""
        text = spec.parameters.get("idle_unload_s")
        if text is None:
            return self.idle_unload_s
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            raise BadModelConfig(
                f"model '{spec.name}': parameter idle_unload_s: expected a number of seconds, 0 for never, got "
                f"'{text[:80]}'"
            )
        return seconds

    def reload_policy_of(self, spec: ModelSpec) -> ReloadPolicy:
        """Return the model's own policy, its parameter `reload_policy`, or the server's. Raises BadModelConfig."""
        text = spec.parameters.get("reload_policy")
        if text is None:
            return self.reload_policy
        try:
            return ReloadPolicy(text.strip().lower())
        except ValueError:
            raise BadModelConfig(
                f"model '{spec.name}': parameter reload_policy must be overlap or replace, got '{text[:80]}'"
            ) from None
