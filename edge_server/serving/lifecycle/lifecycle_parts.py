"""Composition of the models' lifecycle: makes and connects the parts that load, route and unload models.

The `ModelTable` decides, the `Reconciler` loads and unloads with the `Loader`, the `Router` finds versions for requests
and answers questions, and the `PeriodicChecks` find idle models and hung runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.serving.execution.gpu_state import Gpus
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.loader import Loader
from edge_server.serving.lifecycle.model_table import ModelTable
from edge_server.serving.lifecycle.periodic_checks import PeriodicChecks
from edge_server.serving.lifecycle.reconciler import MemoryCheck, Opening, Reconciler
from edge_server.serving.lifecycle.router import Router
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import EventQueue, PublishEvent

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache


class ModelLifecycle(NamedTuple):
    """`InferenceService` holds these parts, and closes them."""

    settings: LifecycleSettings
    admission_control: AdmissionControl
    events: EventQueue
    table: ModelTable
    router: Router
    loader: Loader
    reconciler: Reconciler
    checks: PeriodicChecks


def make_lifecycle(
    timer: Timer,
    backend_settings: Mapping[str, Mapping[str, str]],
    *,
    load_threads: int = 2,
    publish: PublishEvent | None = None,
    settings: LifecycleSettings | None = None,
    check_memory: MemoryCheck | None = None,
    admission_control: AdmissionControl = ADMIT_ALL,
    limiter: RateLimiter | None = None,
    cache: ResponseCache | None = None,
    gpus: Gpus | None = None,
    on_no_fallback: Callable[[str], None] = lambda reason: None,
    opening: Opening = lambda name, version, fingerprint: contextlib.nullcontext(),
) -> ModelLifecycle:
    """Return the parts, connected; the periodic checks have begun.

    `backend_settings` are those of the backends, by name. `publish` is called with each model event. `settings` None:
    the defaults. `check_memory` None: there is always enough memory. `admission_control` is asked before a request
    runs. `limiter` None: instances run whenever they are free. `cache` None: no response cache. `gpus` None: no GPU.
    `on_no_fallback`: see `ModelTable`. `opening`: see `Opening`.
    """
    settings = settings or LifecycleSettings()
    gpus = gpus or Gpus()
    events = EventQueue(publish)
    table = ModelTable(timer, settings, events, gpus, on_no_fallback)
    router = Router(table, timer, settings)
    loader = Loader(
        timer, backend_settings, settings, admission_control, limiter, cache,
        members=router, gpus=gpus, on_gpu_fault=table.handle_gpu_fault,
    )  # fmt: skip
    reconciler = Reconciler(
        table, loader, timer, settings, events, load_threads=load_threads, check_memory=check_memory, opening=opening
    )
    checks = PeriodicChecks(table, timer, settings, events)
    return ModelLifecycle(settings, admission_control, events, table, router, loader, reconciler, checks)
