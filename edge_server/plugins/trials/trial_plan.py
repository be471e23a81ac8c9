"""Plan of `edge-server optimize`: reads a model's folder, and lists the ways to run the model, each with its
configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.backends.cuda import cuda_driver
from edge_server.backends.trial_engines import TrialEngineSettings
from edge_server.config import ServerConfig
from edge_server.config.server_config import settings_of_backend
from edge_server.errors import BadModelConfig, InvalidRequest, LoadError, UnknownModel
from edge_server.plugin import own_plugins
from edge_server.plugins.trials.accelerator_candidates import DeviceLister
from edge_server.plugins.trials.candidate import TARGET_DEVICE, RuntimeCandidate, config_of
from edge_server.plugins.trials.candidate_list import candidates_for
from edge_server.plugins.trials.comparison import CandidateTrial
from edge_server.repository.choice.backend_choice import timed_choice
from edge_server.repository.disk.scan import ModelDirectory, Scanner
from edge_server.repository.model_config.pbtxt import ConfigMessage, new_config, read_file, write_json


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """Model and options of a comparison. `config_name` selects the configuration to start from.

    `version` None means the newest served version. `precisions` are the precisions to try in addition to the reference;
    () means all. `profiles` are the minimum, optimum and maximum shapes of engines, in the syntax of the parameters.
    `is_opened_only`: the model is opened and closed, and runs nothing; it may be a language model. Without it, a GGUF
    file's model generates texts.
    """

    root: Path
    model: str
    version: int | None = None
    config_name: str = ""
    runtimes: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    allows_external_links: bool = False
    is_opened_only: bool = False


@dataclass(frozen=True, slots=True)
class TrialEnvironment:
    """Settings and folders of the comparison. `settings[backend][key]` are the server's settings for all models.

    `scratch` is a temporary folder. `list_devices` returns the devices of a runtime. `engines` None: none are built.
    """

    settings: Mapping[str, Mapping[str, str]]
    scratch: Path
    list_devices: DeviceLister
    engines: TrialEngineSettings | None = None

    @classmethod
    def with_engines(cls, config: ServerConfig, scratch: Path, list_devices: DeviceLister) -> TrialEnvironment:
        """Return the environment in which engines are built as the server's settings say."""
        declared = (plugin.trial_engines(config) for plugin in own_plugins())
        return cls(config.backends, scratch, list_devices, next(filter(None, declared), None))


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Trials, in order of preference as the reference. `left_out` lists skipped candidates with the reasons."""

    model_dir: Path
    version: int
    trials: tuple[CandidateTrial, ...]
    left_out: tuple[str, ...]
    configs: Mapping[RuntimeCandidate, ConfigMessage]
    file_name: str
    texts_at_once: int
    """Sequences that a language model in a GGUF file continues together, 0 for another model."""
    stated_backend: str
    """The backend or platform that the configuration names, or ""."""


def make_plan(request: TrialRequest, environment: TrialEnvironment) -> TrialPlan:
    """Plan the trials for a model without opening it. Raises UnknownModel, LoadError and InvalidRequest."""
    model = _find_model(request)
    version = _selected_version(model, request.version)
    base = new_config() if model.config_path is None else read_file(model.config_path, model.name)
    if base.HasField("ensemble_scheduling"):
        raise BadModelConfig(f"model '{model.name}' is an ensemble: optimize its members one by one")
    for_all = settings_of_backend(environment.settings, "openvino").get(TARGET_DEVICE)
    if for_all and TARGET_DEVICE not in base.parameters:  # so that each candidate sets its device explicitly
        base.parameters[TARGET_DEVICE].string_value = for_all
    no_gpu = cuda_driver.unavailable_reason()
    candidate_list = candidates_for(
        base,
        model.name,
        model.path / str(version),
        no_gpu=no_gpu,
        list_devices=environment.list_devices,
        only=request.runtimes,
    )
    wanted = _with_precisions(candidate_list.candidates, request.precisions)
    if not wanted:
        raise LoadError(f"model '{model.name}': there is no runtime to try: {'; '.join(candidate_list.left_out)}")
    engines = environment.engines
    shapes = dict(zip(engines.shape_parameters, request.profiles, strict=False)) if engines is not None else {}
    configs = {one: config_of(base, one, candidate_list.file_name, shapes, has_gpu=not no_gpu) for one in wanted}
    is_text = Path(candidate_list.file_name).suffix.lower() == ".gguf"
    texts_at_once = timed_choice(candidate_list.file_name, model.path / str(version), base).at_once if is_text else 0
    common = {
        "root": str(request.root),
        "model": model.name,
        "version": version,
        "allows_external_links": request.allows_external_links,
        "is_opened_only": request.is_opened_only or is_text,
        "texts_at_once": 0 if request.is_opened_only else texts_at_once,
        "gpu_count": 0 if no_gpu else len(cuda_driver.devices()),
        "profiles": list(request.profiles),
        "settings": {name: dict(values) for name, values in environment.settings.items()},
        "engines": engines,
    }
    trials = []
    for number, (candidate, config) in enumerate(configs.items()):
        scratch = environment.scratch / f"build-{number}"
        scratch.mkdir()
        job = {**common, "runtime": candidate.runtime, "config_json": write_json(config), "scratch": str(scratch)}
        trials.append(CandidateTrial(candidate, job))
    left_out, file_name = candidate_list.left_out, candidate_list.file_name
    stated = base.backend or base.platform
    return TrialPlan(model.path, version, tuple(trials), left_out, configs, file_name, texts_at_once, stated)


def _with_precisions(candidates: Sequence[RuntimeCandidate], precisions: Sequence[str]) -> list[RuntimeCandidate]:
    """Return the candidates with these precisions, and the references. Raises InvalidRequest for an unknown one."""
    if not precisions:
        return list(candidates)
    known = list(dict.fromkeys(one.precision for one in candidates if one.precision))
    unknown = next((precision for precision in precisions if precision not in known), None)
    if unknown is not None:
        raise InvalidRequest(
            f"--precisions: no runtime has '{unknown}' for this model; there are {', '.join(known) or 'none'}"
        )
    return [one for one in candidates if one.is_plain or one.precision in precisions]


def _find_model(request: TrialRequest) -> ModelDirectory:
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


def _selected_version(model: ModelDirectory, requested: int | None) -> int:
    present: Sequence[int] = [version.number for version in model.versions]
    if requested is None:
        return max(model.desired_versions or tuple(present))
    if requested not in present:
        raise UnknownModel(f"model '{model.name}' has no version {requested}; it has {', '.join(map(str, present))}")
    return requested
