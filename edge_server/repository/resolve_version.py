"""Preparation of a version for its load: reads its files, completes and checks its configuration, and names the file to
open."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import NamedTuple

from edge_server.backends import ONNX_ORDER, engine_backends
from edge_server.backends.base import Backend
from edge_server.config.server_config import DEFAULT_BATCH_SIZE
from edge_server.core.model_spec import ModelFile, ModelSpec
from edge_server.core.version_lifecycle import FolderReader, OutputCheck, Recogniser, Resolved
from edge_server.errors import BadModelConfig, ChangedWhileLoading, EdgeServerError, LoadError
from edge_server.record import record
from edge_server.repository.choice.first_opening import FirstOpenings
from edge_server.repository.choice.model_formats import backend_of_platform
from edge_server.repository.choice.runtime_times import RuntimeTimes
from edge_server.repository.disk.file_fingerprint import children, describe_files, digest
from edge_server.repository.disk.scan import ModelDirectory, read_entries
from edge_server.repository.load_error_explanation import explain_by_content
from edge_server.repository.model_config.auto_complete import (
    InspectedFile,
    check_against_file,
    complete,
    inspect_model,
    unsure_outputs,
)
from edge_server.repository.model_config.config_defaults import Devices, normalise
from edge_server.repository.model_config.config_to_spec import to_spec
from edge_server.repository.model_config.labels import read_labels
from edge_server.repository.model_config.metadata_files import read_metadata_files
from edge_server.repository.model_config.parameter_names import find_misspelt
from edge_server.repository.model_config.pbtxt import ConfigMessage, new_config, parse_json, read_file, write_json
from edge_server.repository.model_config.validate_config import check_complete, check_stated, is_ensemble
from edge_server.repository.trust.checksum_agent import run_agents
from edge_server.repository.trust.verify_version import TrustPolicy, verify

_NOTHING: Mapping[str, str] = {}

_ENGINE_PRECISIONS = ("fp32", "fp16", "f16", "best")
"""Values of `precision` that are meant for the engine and not for the runtime that serves until it is built."""


@record(frozen=True, slots=True)
class ResolveOptions:
    """Settings of `resolve`.

    `auto_complete`: fill missing fields from the model file. `gpu_count`: GPUs of the machine.

    `checks` get each complete specification and raise BadModelConfig. They check the `parameters` of other parts of the
    server, so that a wrong one fails the load and not the first request. `output_checks` do so too, and return checks
    of the model's answer, or None. `folder_readers` add to the specification what the model's folder says.
    `recognisers` get the specification and the metadata of the file and beside it.
    `trust`: rules for the checksums and signatures of a version's files.
    `backend_settings`: those of `--backend-config`, by backend; "" for all.
    `onnx_order`: the runtimes tried for an ONNX file. `runtime_times` may change this order; None: it does not.
    `first_openings`: see there; None: files are opened here at once.
    """

    auto_complete: bool = True
    gpu_count: int = 0
    checks: tuple[Callable[[ModelSpec], object], ...] = ()
    output_checks: tuple[Callable[[ModelSpec], OutputCheck | None], ...] = ()
    folder_readers: tuple[FolderReader, ...] = ()
    recognisers: tuple[Recogniser, ...] = ()
    trust: TrustPolicy = field(default_factory=TrustPolicy)
    backend_settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    onnx_order: tuple[str, ...] = ONNX_ORDER
    runtime_times: RuntimeTimes | None = None
    first_openings: FirstOpenings | None = None
    lost_gpus: Callable[[], Iterable[int]] = tuple
    """Called at each load; returns the GPUs that this process can no longer use."""


def resolve(
    model: ModelDirectory,
    version: int,
    options: ResolveOptions,
    config_json: str | None = None,
    passed_over: Mapping[str, str] = _NOTHING,
) -> Resolved:
    """Read, complete, check and normalise one version's configuration.

    `config_json` replaces the configuration on disk. `passed_over` maps runtimes that failed to open the version to the
    reason. The files are verified first. Then the runtime that will serve the model opens its file to read inputs and
    outputs, which may take long. Raises LoadError (BadModelConfig, BackendMissing, Untrusted, ChangedWhileLoading).
    """
    if version not in {found.number for found in model.versions}:
        raise LoadError(model.problem or f"model '{model.name}' has no version {version} in '{model.path}'")
    misnamed = _misnamed_configs(model.path) if model.config_path is None and config_json is None else []
    try:
        resolved = _resolve(model, version, options, config_json, passed_over)
    except LoadError as error:
        if misnamed:
            error.message = "; ".join((error.message, *misnamed))
            error.args = (error.message,)
        raise
    if not misnamed:
        return resolved
    return replace(resolved, spec=replace(resolved.spec, warnings=(*resolved.spec.warnings, *misnamed)))


def _resolve(
    model: ModelDirectory,
    version: int,
    options: ResolveOptions,
    config_json: str | None,
    passed_over: Mapping[str, str],
) -> Resolved:
    verified = verify(model, version, options.trust, is_config_given=config_json is not None)
    config = _read(model, config_json)
    check_stated(config, model.name)
    run_agents(config, model.name, model.path, version)
    if is_ensemble(config):
        normalise(config, model.name, Devices())
        file = ModelFile(model.path / str(version), model.path, version)
        spec = _make_spec(config, model, options, ())
        return Resolved(spec, file, confirm=verified.confirm, output_checks=_output_checks(spec, options))
    inspected = inspect_model(
        config, model.name, model.path, version, passed_over, options.onnx_order, options.runtime_times,
        options.first_openings,
    )  # fmt: skip
    _remove_engine_settings(config, inspected, passed_over)
    notes, has_default_batch_size = _complete_config(config, model.name, inspected, options)
    unlogged_notes = inspected.unlogged_notes
    if options.runtime_times is not None and (note := options.runtime_times.precision_note(inspected.file.path)):
        unlogged_notes = (*unlogged_notes, note)
    routine_notes = (*unlogged_notes, *inspected.notes, *notes)
    notes = (*inspected.notes, *inspected.skipped, *notes)
    metadata = _NOTHING
    if inspected.signature is not None and options.recognisers:
        metadata = {**read_metadata_files(inspected.file), **inspected.signature.metadata}
    spec = _make_spec(config, model, options, notes, metadata, inspected.backend)
    unsure = frozenset[str]() if inspected.signature is None else unsure_outputs(config, inspected.signature)
    spec = replace(
        spec,
        outputs=tuple(item._replace(may_differ=item.name in unsure) for item in spec.outputs),
        unlogged_notes=unlogged_notes,
        routine_notes=routine_notes,
        has_default_batch_size=has_default_batch_size,
    )
    if inspected.signature is not None:
        spec = replace(spec, warnings=(*spec.warnings, *inspected.signature.warnings))
    output_checks = _output_checks(spec, options)
    verified.confirm()
    file = inspected.file
    return Resolved(
        spec,
        file,
        inspected.has_alternatives,
        verified.confirm,
        inspected.skipped,
        output_checks,
        lambda error: explain_by_content(error, file),
    )


def _misnamed_configs(folder: Path) -> list[str]:
    """Return a warning for each file that was probably meant to be config.pbtxt."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    # Browsers and Windows add or hide an ending, and editors save as .txt.
    likely = [name for name in names if re.fullmatch(r"config(\.txt|.*pb.*)?", name, re.IGNORECASE)]
    return [f"'{name}' is not read, did you mean config.pbtxt?" for name in likely]


def _output_checks(spec: ModelSpec, options: ResolveOptions) -> tuple[OutputCheck, ...]:
    return tuple(check for make in options.output_checks if (check := make(spec)) is not None)


def _remove_engine_settings(config: ConfigMessage, inspected: InspectedFile, passed_over: Mapping[str, str]) -> None:
    """Remove the settings that are meant for the engine, if another runtime serves until the engine is built."""
    precision = config.parameters["precision"].string_value if "precision" in config.parameters else ""
    need_engines = engine_backends()
    if inspected.backend.name in need_engines or not any(name in passed_over for name in need_engines):
        return
    if precision.strip().lower() in _ENGINE_PRECISIONS:
        del config.parameters["precision"]
    if backend_of_platform().get(config.platform) in need_engines:
        config.platform = ""


def _make_spec(
    config: ConfigMessage,
    model: ModelDirectory,
    options: ResolveOptions,
    notes: tuple[str, ...],
    metadata: Mapping[str, str] = _NOTHING,
    backend: Backend | None = None,
) -> ModelSpec:
    """Return the checked specification of a complete configuration. `backend`: None for an ensemble."""
    check_complete(config, model.name, is_program=backend is not None and backend.runs_programs)
    labels = {
        output.name: read_labels(model.name, output.name, model.path, output.label_filename)
        for output in config.output
        if output.label_filename
    }
    used_fields: Collection[str] = ()
    warnings: tuple[str, ...] = ()
    if backend is not None:
        used_fields = backend.used_fields
        warnings = () if backend.names_parameters else find_misspelt(config.parameters)
    spec = to_spec(config, labels, notes, used_fields, warnings)
    for read in options.folder_readers:
        spec = read(spec, model.path)
    for recognise in options.recognisers:
        if (found := recognise(spec, metadata)) is not None:
            spec = replace(spec, recognised=found, notes=(*spec.notes, found.note))
            break
    for check in options.checks:
        check(spec)
    return spec


def _read(model: ModelDirectory, config_json: str | None) -> ConfigMessage:
    if config_json is not None:
        return parse_json(config_json, model.name)
    return new_config() if model.config_path is None else read_file(model.config_path, model.name)


def _complete_by_model(config: ConfigMessage, model: str, inspected: InspectedFile) -> None:
    """Let a Python model complete its configuration, in place. Raises LoadError."""
    config.name = model
    try:
        completed = inspected.backend.auto_complete(inspected.file, write_json(config))
    except LoadError as error:
        if explained := explain_by_content(error, inspected.file):
            raise explained from error
        raise
    if completed is None:
        return
    whole = parse_json(completed, model, "the configuration completed by the model")
    config.CopyFrom(whole)
    check_stated(config, model)


def _complete_config(
    config: ConfigMessage, model: str, inspected: InspectedFile, options: ResolveOptions
) -> tuple[tuple[str, ...], bool]:
    """Complete the configuration in place. Return notes about this, and whether max_batch_size is the backend's
    default."""
    backend, file, signature = inspected.backend, inspected.file, inspected.signature
    notes: list[str] = []
    is_stated = config.max_batch_size > 0
    if options.auto_complete:
        _complete_by_model(config, model, inspected)
    config.backend = backend.name
    if file.path != file.version_dir:
        config.default_model_filename = file.path.relative_to(file.version_dir).as_posix()
    has_default_batch_size = False
    if signature is not None:
        if options.auto_complete:
            states_none = config.max_batch_size == 0
            settings = {} if is_stated else options.backend_settings
            default = signature.most_rows or _default_max_batch_size(backend, model, settings)
            notes += complete(config, model, signature, default)
            has_default_batch_size = states_none and config.max_batch_size > 0 and signature.most_rows is None
        check_against_file(
            config, model, signature, needs_every_input=backend.needs_every_input,
            compares_output_sizes=backend.compares_output_sizes,
        )  # fmt: skip
    lost = frozenset(options.lost_gpus())
    count = backend.default_instance_count
    normalise(config, model, Devices(options.gpu_count, backend.runs_on_gpu, count, lost))
    return tuple(notes), has_default_batch_size


def _default_max_batch_size(backend: Backend, model: str, settings: Mapping[str, Mapping[str, str]]) -> int:
    """Return the max_batch_size of models that state none. Raises BadModelConfig for a setting without an effect."""
    own = settings.get(backend.name, {}).get(DEFAULT_BATCH_SIZE)
    if backend.default_max_batch_size == Backend.default_max_batch_size:
        text = own or settings.get("", {}).get(DEFAULT_BATCH_SIZE)
        return int(text) if text else backend.default_max_batch_size
    # A default for its kind of models, which may come from `auto_complete`.
    if own is not None:
        raise BadModelConfig(
            f"model '{model}': expected no --backend-config={backend.name},{DEFAULT_BATCH_SIZE}, given {own}: this "
            f"backend has a default of its own, {backend.default_max_batch_size}; state max_batch_size in config.pbtxt"
        )
    return backend.default_max_batch_size


def resolve_as_scanned(
    model: ModelDirectory,
    version: int,
    options: ResolveOptions,
    config_json: str | None = None,
    passed_over: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve a version as `resolve` does, but only from the files that the scan listed: loads wait for each other, and
    a user may change a file meanwhile. Raises ChangedWhileLoading if the files differ from the scan. The result's
    `confirm` raises it if they have changed since. New files that a model adds while it is opened are allowed."""
    files = _ScannedFiles.as_scanned(model, version)
    try:
        resolved = resolve(model, version, options, config_json, passed_over or {})
    except EdgeServerError:
        # If a file is half written, report the change and not the parser's error.
        files.confirm()
        raise
    files.confirm()

    def confirm() -> None:
        resolved.confirm()
        files.confirm()

    return replace(resolved, confirm=confirm)


class _ScannedFiles(NamedTuple):
    """The files of a version, per folder, as `file_fingerprint.describe_files` lists them."""

    model: ModelDirectory
    version: int
    outside: tuple[str, ...]
    inside: tuple[str, ...]

    @classmethod
    def as_scanned(cls, model: ModelDirectory, version: int) -> _ScannedFiles:
        """Return the files if they are those of the scan. Raises ChangedWhileLoading."""
        outside, inside = _describe_version(model, version)
        if f"{digest(outside)}.{digest(inside)}" != model.file_fingerprint_of(version):
            raise ChangedWhileLoading(
                f"model '{model.name}' version {version}: its files in '{model.path}' changed before it was loaded"
            )
        return cls(model, version, outside, inside)

    def confirm(self) -> None:
        """Raise ChangedWhileLoading if one of the files changed or was removed."""
        outside, inside = _describe_version(self.model, self.version)
        folder = self.model.path / str(self.version)
        for place, before, now in ((self.model.path, self.outside, outside), (folder, self.inside, inside)):
            changed = set(before).difference(now)
            if changed:
                # A line is the name of a file, a zero and what describes it.
                name = min(changed).partition("\0")[0]
                raise ChangedWhileLoading(f"'{place / name}' changed while it was loaded")


def _describe_version(model: ModelDirectory, version: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    folder = model.path / str(version)
    try:
        return describe_files(model.path, read_entries(model.path).others), describe_files(folder, children(folder))
    except OSError as error:
        raise ChangedWhileLoading(
            f"model '{model.name}' version {version}: '{error.filename or folder}' changed before it was loaded: "
            f"{error.strerror}"
        ) from error
