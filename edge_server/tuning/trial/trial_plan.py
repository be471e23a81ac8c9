"""Trial plan: the candidates for a model folder, each with its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.backends.tensorrt import cuda_driver
from edge_server.errors import BadModelConfig, InvalidRequest, LoadError, UnknownModel
from edge_server.repository.pbtxt import ConfigMessage, new_config, read_file, write_json
from edge_server.repository.scan import ModelDirectory, Scanner
from edge_server.tuning.trial.accelerators import Survey
from edge_server.tuning.trial.candidate import TARGET_DEVICE, RuntimeCandidate, config_of
from edge_server.tuning.trial.candidate_list import candidates_for
from edge_server.tuning.trial.comparison import CandidateTrial


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What is asked. `config_name` picks the configuration to start from; `version` None is the one that is served.

    `precisions` are those to try besides what the others are compared with, () for all.
    `profiles`: the shapes of engines, least, best and largest, as the parameters of those names write them.
    """

    root: Path
    model: str
    version: int | None = None
    config_name: str = ""
    runtimes: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    allows_external_links: bool = False


@dataclass(frozen=True, slots=True)
class TrialEnvironment:
    """`settings[backend][key]`: those that the server has for all models. `scratch`: a folder that goes away. `survey`
    asks a runtime what it finds on the box."""

    settings: Mapping[str, Mapping[str, str]]
    engine_cache: str
    build_timeout_s: float
    scratch: Path
    survey: Survey


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Trials, references first, and what is left out, with the reasons."""

    model_dir: Path
    version: int
    trials: tuple[CandidateTrial, ...]
    left_out: tuple[str, ...]
    configs: Mapping[RuntimeCandidate, ConfigMessage]


def make_plan(request: TrialRequest, around: TrialEnvironment) -> TrialPlan:
    """Look at the model and lay out the trials. Opens nothing. Raises UnknownModel, LoadError (BadModelConfig), and
    InvalidRequest."""
    model = _find(request)
    version = _version(model, request.version)
    base = new_config() if model.config_path is None else read_file(model.config_path, model.name)
    if base.HasField("ensemble_scheduling"):
        raise BadModelConfig(f"model '{model.name}' is an ensemble: optimize its members one by one")
    for_all = around.settings.get("openvino", {}).get(TARGET_DEVICE)
    if for_all and TARGET_DEVICE not in base.parameters:  # each candidate says its own, so that none is elsewhere
        base.parameters[TARGET_DEVICE].string_value = for_all
    no_gpu = cuda_driver.unavailable_reason()
    field = candidates_for(
        base, model.name, model.path / str(version), no_gpu=no_gpu, survey=around.survey, only=request.runtimes
    )
    wanted = _wanted(field.candidates, request.precisions)
    if not wanted:
        raise LoadError(f"model '{model.name}': there is no runtime to try: {'; '.join(field.left_out)}")
    configs = {one: config_of(base, one, field.file_name, request.profiles) for one in wanted}
    common = {
        "root": str(request.root),
        "model": model.name,
        "version": version,
        "allows_external_links": request.allows_external_links,
        "gpu_count": 0 if no_gpu else len(cuda_driver.devices()),
        "profiles": list(request.profiles),
        "settings": {name: dict(values) for name, values in around.settings.items()},
        "engine_cache": around.engine_cache,
        "build_timeout_s": around.build_timeout_s,
    }
    trials = []
    for number, (candidate, config) in enumerate(configs.items()):
        scratch = around.scratch / f"build-{number}"
        scratch.mkdir()
        job = {**common, "runtime": candidate.runtime, "config_json": write_json(config), "scratch": str(scratch)}
        trials.append(CandidateTrial(candidate, job))
    return TrialPlan(model.path, version, tuple(trials), field.left_out, configs)


def _wanted(candidates: Sequence[RuntimeCandidate], precisions: Sequence[str]) -> list[RuntimeCandidate]:
    """Return the candidates of these precisions, and the reference. Raises InvalidRequest for one that none has."""
    if not precisions:
        return list(candidates)
    known = list(dict.fromkeys(one.precision for one in candidates if one.precision))
    unknown = next((word for word in precisions if word not in known), None)
    if unknown is not None:
        raise InvalidRequest(
            f"--precision: no runtime has '{unknown}' for this model; there are {', '.join(known) or 'none'}"
        )
    return [one for one in candidates if one.is_plain or one.precision in precisions]


def _find(request: TrialRequest) -> ModelDirectory:
    scanner = Scanner([request.root], request.config_name, allows_external_links=request.allows_external_links)
    if not request.root.is_dir():
        raise UnknownModel(f"there is no folder '{request.root}'")
    model = scanner.find(request.model)
    if model is None:
        known = ", ".join(scanner.names()[:20]) or "none"
        raise UnknownModel(f"there is no model '{request.model}' in '{request.root}'; there are: {known}")
    if model.problem and not model.versions:
        raise LoadError(model.problem)
    return model


def _version(model: ModelDirectory, asked: int | None) -> int:
    present: Sequence[int] = [version.number for version in model.versions]
    if asked is None:
        return max(model.desired_versions or tuple(present))
    if asked not in present:
        raise UnknownModel(f"model '{model.name}' has no version {asked}; it has {', '.join(map(str, present))}")
    return asked
