"""The merge: flag > environment > file > default, then what no single setting can check alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_server.config.cache import chosen_cache, with_credentials
from edge_server.config.kinds import ConfigError
from edge_server.config.setting import CONFIG_VARIABLE, Setting
from edge_server.config.slices import GrpcConfig, HttpConfig, RepositoryConfig, RestrictedGroup, ServerConfig
from edge_server.config.sources import BACKENDS, Given, read_environment, read_file, read_flags
from edge_server.config.table import SETTINGS

_WILDCARDS = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """The merged configuration, where each setting came from, and what else the command line asked.

    `origins` maps setting names to "flag --x", "environment X" or "file F"; names not in it have their default.
    With `asks_help` or `asks_print` the caller prints `help_text()` or `describe(...)` instead of serving.
    """

    config: ServerConfig
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    asks_help: bool = False
    asks_print: bool = False


def parse_serve(argv: Sequence[str], environ: Mapping[str, str]) -> ServeArguments:
    """Merge the arguments of `serve` (without program and command), the environment and the file that they name.

    Raises ConfigError with one sentence for the operator.
    """
    flags = read_flags(argv)
    if flags.asks_help:
        return ServeArguments(ServerConfig(), {}, (), asks_help=True)
    path = flags.config_file or environ.get(CONFIG_VARIABLE, "")
    layers = [read_file(path) if path else {}, read_environment(environ), flags.given]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        given = [layer[setting.name] for layer in layers if setting.name in layer]
        if setting.name == BACKENDS:
            values[setting.name] = _merge_backends(setting, given)
        elif given:
            values[setting.name] = _convert(setting, given[-1])
        if given:
            origins[setting.name] = given[-1].origin
    config = _complete(_assemble(values), environ)
    _check(config, needs_repository=not flags.asks_print)
    warnings = (*flags.warnings, *_doubts(config))
    return ServeArguments(config, origins, warnings, asks_print=flags.asks_print)


def _convert(setting: Setting, given: Given) -> object:
    values = [_parse(setting, text, given.origin) for text in given.texts]
    return tuple(values) if setting.separator else values[-1]


def _parse(setting: Setting, text: str, origin: str) -> object:
    try:
        return setting.kind.parse(text)
    except ValueError as error:
        shown = "" if setting.kind.is_secret else f", got '{text[:200]}'"
        raise ConfigError(f"{origin}: {error}{shown}") from error


def _merge_backends(setting: Setting, layers: Sequence[Given]) -> dict[str, dict[str, str]]:
    """Merge key by key: a flag for one setting of a backend leaves the file's others in force."""
    backends: dict[str, dict[str, str]] = {}
    for given in layers:
        for text in given.texts:
            parsed: Any = _parse(setting, text, given.origin)
            backend, key, value = parsed
            backends.setdefault(backend, {})[key] = value
    return backends


def _assemble(values: Mapping[str, Any]) -> ServerConfig:
    defaults = ServerConfig()
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        if field:
            changes.setdefault(section, {})[field] = value
    slices = {section: replace(getattr(defaults, section), **fields) for section, fields in changes.items()}
    return replace(defaults, backends=values[BACKENDS], **slices)


def _complete(config: ServerConfig, environ: Mapping[str, str]) -> ServerConfig:
    """Fill in what follows from other settings, or from variables that the system sets."""
    repository = config.repository
    if not repository.cache_dir and any("://" in path for path in repository.paths):
        repository = replace(repository, cache_dir=_default_cache_dir(environ))
    engines = config.engines
    if not engines.cache_dir:
        engines = replace(engines, cache_dir=os.path.join(_default_cache_dir(environ), "engines"))
    return replace(
        config,
        repository=repository,
        engines=engines,
        cache=with_credentials(config.cache, environ),
        grpc=replace(config.grpc, is_tls=config.grpc.is_tls or config.grpc.is_mutual_tls),
        metrics=replace(config.metrics, address=config.metrics.address or config.http.address),
        log=replace(config.log, journal_stream=environ.get("JOURNAL_STREAM", "")),
    )


def _default_cache_dir(environ: Mapping[str, str]) -> str:
    """Return where copies of remote repositories, and engines, go: where the service manager says, if it does."""
    # With several directories in its unit, systemd gives a list.
    given = environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if given:
        return given
    shared = "/var/cache/edge_server"
    if os.access(shared if os.path.isdir(shared) else os.path.dirname(shared), os.W_OK):
        return shared
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(home, "edge_server")


def _check(config: ServerConfig, *, needs_repository: bool) -> None:
    if needs_repository and not config.repository.paths:
        raise ConfigError("no model repository: give at least one --model-repository")
    _check_repository(config.repository)
    chosen_cache(config.cache)
    _check_tls(config.http, config.grpc)
    _check_ports(config)
    _check_restricted("--http-restricted-api", config.http.restricted)
    _check_restricted("--grpc-restricted-protocol", config.grpc.restricted)


def _check_repository(repository: RepositoryConfig) -> None:
    if repository.load_models and repository.control_mode != "explicit":
        raise ConfigError("--load-model needs --model-control-mode=explicit")
    if "*" in repository.load_models and len(repository.load_models) > 1:
        raise ConfigError("--load-model='*' stands for all models and must be the only one")


def _check_tls(http: HttpConfig, grpc: GrpcConfig) -> None:
    if bool(http.tls_cert) != bool(http.tls_key):
        raise ConfigError("HTTPS needs both --http-tls-cert and --http-tls-key")
    if http.client_ca and not http.tls_cert:
        raise ConfigError("--https-client-ca needs --http-tls-cert and --http-tls-key")
    if grpc.is_tls and not (grpc.server_cert and grpc.server_key):
        raise ConfigError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
    if grpc.is_mutual_tls and not grpc.root_cert:
        raise ConfigError("--grpc-use-ssl-mutual needs --grpc-root-cert")


def _check_ports(config: ServerConfig) -> None:
    taken: list[tuple[str, str, int]] = []
    for flag, listener in (
        ("--http-port", config.http),
        ("--grpc-port", config.grpc),
        ("--metrics-port", config.metrics),
    ):
        if not listener.is_enabled or not listener.port:
            continue
        for other, address, port in taken:
            overlaps = address == listener.address or address in _WILDCARDS or listener.address in _WILDCARDS
            if port == listener.port and overlaps:
                raise ConfigError(f"{other} and {flag} are both {port}")
        taken.append((flag, listener.address, listener.port))


def _check_restricted(flag: str, groups: Sequence[RestrictedGroup]) -> None:
    seen: set[str] = set()
    for group in groups:
        for category in group.categories:
            if category in seen:
                raise ConfigError(f"{flag}: '{category}' is in more than one group")
            seen.add(category)


def _doubts(config: ServerConfig) -> list[str]:
    """Return warnings about settings that are valid but probably not meant."""
    doubts = []
    if config.trace.level and config.trace.mode == "triton" and not config.trace.file:
        doubts.append("--trace-config level is given but triton,file is not: nothing is traced")
    if config.grpc.server_cert and not config.grpc.is_tls:
        doubts.append("--grpc-server-cert is given but --grpc-use-ssl is not: gRPC is not encrypted")
    if not (config.http.is_enabled or config.grpc.is_enabled):
        doubts.append("HTTP and gRPC are both off: nobody can ask this server anything")
    return doubts
