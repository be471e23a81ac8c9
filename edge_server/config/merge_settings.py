"""Parser of the arguments of `serve`: merges flags, environment, TOML file and defaults, and checks settings that
depend on each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_server.config.cache_config import choose_cache, with_credentials
from edge_server.config.server_config import DeclaredSettings, ServerConfig, SettingOwner
from edge_server.config.setting import ConfigError, Setting
from edge_server.config.setting_sources import BACKENDS, CONFIG_VARIABLE, Given, read_environment, read_file, read_flags
from edge_server.record import record

_WILDCARDS = ("0.0.0.0", "::", "[::]")

DEMO_MODELS = Path(__file__).parents[1] / "demo_models"
"""Bundled models of --demo. In a clone this is a link to the folder model_repository."""


@record(frozen=True, slots=True)
class ServeArguments:
    """Merged configuration and its origins. `declared`: the settings that may be given.

    `origins` maps setting names to "flag --x", "environment X" or "file F"; settings not in it have their default.
    With `asks_help` or `asks_print` the caller prints `help_text(...)` or `describe(...)` instead of serving.
    """

    declared: DeclaredSettings
    config: ServerConfig
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    asks_help: bool = False
    asks_print: bool = False


def parse_serve(
    argv: Sequence[str], environ: Mapping[str, str], plugins: Sequence[SettingOwner] = ()
) -> ServeArguments:
    """Merge the arguments of `serve` (without program and command), the environment and the configuration file.

    Raises ConfigError with one sentence for the operator.
    """
    declared = DeclaredSettings(plugins)
    flags = read_flags(argv, declared)
    if flags.asks_help:
        return ServeArguments(declared, ServerConfig(), {}, (), asks_help=True)
    path = flags.config_file or environ.get(CONFIG_VARIABLE, "")
    layers = [read_file(path, declared) if path else {}, read_environment(environ, declared), flags.given]
    tables, origins = _merge_layers(declared, layers)
    for setting in declared.settings:
        if setting.cache_folder:
            table = tables.setdefault(setting.section, {})
            table[setting.field] = table.get(setting.field) or os.path.join(
                _default_cache_dir(environ), setting.cache_folder
            )
    plugin_tables = {name: settings(**tables.pop(name, {})) for name, settings in declared.plugin_tables.items()}
    config = ServerConfig(plugin_tables=plugin_tables)
    changes: dict[str, Any] = {
        name: table if name + "." == BACKENDS else replace(getattr(config, name), **table)
        for name, table in tables.items()
    }
    config = _fill_defaults(replace(config, **changes), environ)
    _check(config, needs_repository=not flags.asks_print)
    warnings = [
        *flags.warnings,
        *_find_warnings(config),
        *(text for plugin in plugins for text in plugin.check(config)),
    ]
    return ServeArguments(declared, config, origins, tuple(warnings), asks_print=flags.asks_print)


def _merge_layers(
    declared: DeclaredSettings, layers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the values of each table, and where each setting was given. The last layer that has a setting wins."""
    tables: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for setting in declared.settings:
        given = [layer[setting.name] for layer in layers if setting.name in layer]
        if not given:
            continue
        origins[setting.name] = given[-1].origin
        table = tables.setdefault(setting.section, {})
        if setting.name == BACKENDS:
            # Key by key: a flag for one setting of a backend keeps the file's other settings.
            for backend, key, text in (item for each in given for item in _parse(setting, each)):
                table.setdefault(backend, {})[key] = text
        else:
            parsed = _parse(setting, given[-1])
            table[setting.field] = parsed if setting.separator else parsed[-1]
    return tables, origins


def _parse(setting: Setting, given: Given) -> tuple[Any, ...]:
    values = []
    for text in given.texts:
        try:
            values.append(setting.kind.parse(text))
        except ValueError as error:
            shown = "" if setting.kind.is_secret else f", got '{text[:200]}'"
            raise ConfigError(f"{given.origin}: {error}{shown}") from error
    return tuple(values)


def _fill_defaults(config: ServerConfig, environ: Mapping[str, str]) -> ServerConfig:
    """Fill in defaults that depend on other settings or on variables of the system."""
    repository = config.repository
    if repository.is_demo:
        if not DEMO_MODELS.is_dir():
            raise ConfigError(f"--demo: this installation has no bundled models, expected the folder {DEMO_MODELS}")
        # Once, also if the paths come from the output of --print-config.
        repository = replace(repository, paths=tuple(dict.fromkeys((*repository.paths, str(DEMO_MODELS)))))
    if not repository.cache_dir and any("://" in path for path in repository.paths):
        repository = replace(repository, cache_dir=_default_cache_dir(environ))
    measurements_dir = repository.state_dir or repository.cache_dir or _default_cache_dir(environ)
    repository = replace(repository, measurements_dir=measurements_dir)
    return replace(
        config,
        repository=repository,
        cache=with_credentials(config.cache, environ),
        grpc=replace(config.grpc, is_tls=config.grpc.is_tls or config.grpc.is_mutual_tls),
        metrics=replace(config.metrics, address=config.metrics.address or config.http.address),
        log=replace(config.log, journal_stream=environ.get("JOURNAL_STREAM", "")),
    )


def _default_cache_dir(environ: Mapping[str, str]) -> str:
    """Return the cache folder of the service manager or the user."""
    # systemd sets a list if its unit names several directories.
    given = environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if given:
        return given
    shared = "/var/cache/edge_server"
    if os.access(shared if os.path.isdir(shared) else os.path.dirname(shared), os.W_OK):
        return shared
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(home, "edge_server")


def _check(config: ServerConfig, *, needs_repository: bool) -> None:
    repository, http, grpc = config.repository, config.http, config.grpc
    if needs_repository and not repository.paths:
        raise ConfigError("no model repository: give at least one --model-repository, or --demo for the bundled models")
    if repository.load_models and repository.control_mode != "explicit":
        raise ConfigError("--load-model needs --model-control-mode=explicit")
    if "*" in repository.load_models and len(repository.load_models) > 1:
        raise ConfigError("--load-model='*' stands for all models and must be the only one")
    choose_cache(config.cache)
    if bool(http.tls_cert) != bool(http.tls_key):
        raise ConfigError("HTTPS needs both --http-tls-cert and --http-tls-key")
    if http.client_ca and not http.tls_cert:
        raise ConfigError("--https-client-ca needs --http-tls-cert and --http-tls-key")
    if http.tls_cert and config.metrics.is_enabled and not http.is_enabled:
        # The port of the metrics has the certificates of HTTP, and would open without any.
        raise ConfigError("--http-tls-cert with --allow-http=false needs --allow-metrics=false too")
    if grpc.is_tls and not (grpc.server_cert and grpc.server_key):
        raise ConfigError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
    if grpc.is_mutual_tls and not grpc.root_cert:
        raise ConfigError("--grpc-use-ssl-mutual needs --grpc-root-cert")
    listeners = (("--http-port", http), ("--grpc-port", grpc), ("--metrics-port", config.metrics))
    taken = [(flag, item.address, item.port) for flag, item in listeners if item.is_enabled and item.port]
    for (flag, address, port), (other, other_address, other_port) in itertools.combinations(taken, 2):
        overlaps = address == other_address or address in _WILDCARDS or other_address in _WILDCARDS
        if port == other_port and overlaps:
            raise ConfigError(f"{flag} and {other} are both {port}")
    for flag, groups in (("--http-restricted-api", http.restricted), ("--grpc-restricted-protocol", grpc.restricted)):
        categories = [category for group in groups for category in group.categories]
        for category in categories:
            if categories.count(category) > 1:
                raise ConfigError(f"{flag}: '{category}' is in more than one group")


def _find_warnings(config: ServerConfig) -> list[str]:
    """Return warnings about settings that are valid but probably not intended."""
    warnings = []
    if config.trace.level and config.trace.mode == "triton" and not config.trace.file:
        warnings.append("--trace-config level is given but triton,file is not: nothing is traced")
    if config.grpc.server_cert and not config.grpc.is_tls:
        warnings.append("--grpc-server-cert is given but --grpc-use-ssl is not: gRPC is not encrypted")
    if not (config.http.is_enabled or config.grpc.is_enabled):
        warnings.append("HTTP and gRPC are both off: this server can receive no requests")
    return warnings
