"""Call graph: the models that a BLS call waits for, including the members of an ensemble."""

from __future__ import annotations

from collections.abc import Collection

from edge_server.backends.base import ServerCalls
from edge_server.core.composition_spec import Ensemble, EnsembleStep
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import EdgeServerError


def models_behind(server: ServerCalls, spec: ModelSpec, outputs: Collection[str]) -> tuple[str, ...]:
    """Return the names of the models, no ensembles among them, that answer a request for these outputs; none means
    all."""
    if spec.ensemble is None:
        return (spec.name,)
    found: dict[str, None] = {}
    for step in _running(spec.ensemble, outputs, {item.name for item in spec.outputs}):
        try:
            member = server.model_spec(step.model, step.version)
        except EdgeServerError:
            # The call itself will tell.
            continue
        wanted = step.output_map if member.ensemble is not None else ()
        found.update(dict.fromkeys(models_behind(server, member, wanted)))
    return tuple(found)


def _running(ensemble: Ensemble, outputs: Collection[str], known: set[str]) -> list[EnsembleStep]:
    """Return the steps that make what is asked for, or what one of these takes; those too that make something which
    leads nowhere: they run always. See core.ensemble."""
    taken = {tensor for step in ensemble.steps for tensor in step.input_map.values()}
    made = {tensor for step in ensemble.steps for tensor in step.output_map.values()}
    waiting = [*(outputs or known), *(made - taken - known)]
    running: list[EnsembleStep] = []
    while waiting:
        tensor = waiting.pop()
        for step in ensemble.steps:
            if tensor in step.output_map.values() and step not in running:
                running.append(step)
                waiting += step.input_map.values()
    return running
