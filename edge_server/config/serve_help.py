"""Writer of the text of `edge-server serve --help`, and of a setting's default for it and the reference."""

from __future__ import annotations

import textwrap

from edge_server.config.print_config import toml_text
from edge_server.config.server_config import DeclaredSettings
from edge_server.config.setting import Setting
from edge_server.config.setting_sources import CONFIG_FLAG, CONFIG_VARIABLE, PRINT_FLAG

_MOST_USED = {
    "--model-repository=DIR": "folder of models; repeatable",
    "--demo": "the bundled models, and a first request to copy",
    "--model-control-mode=poll": "follow changes of the repository; or none, explicit",
    "--http-address=0.0.0.0": "accept HTTP of other machines too",
    "--http-port=8000": "port of HTTP, of the page and of OpenAI's API",
    "--grpc-address=0.0.0.0": "accept gRPC of other machines too",
    "--grpc-port=8001": "port of gRPC",
    "--auth-tokens-file=FILE": "tokens that clients need to load models",
    "--state-dir=DIR": "remember rollbacks over a restart",
    "--sources-file=FILE": "cameras that the server reads",
}
"""Flags for the top of the help. Those of plugins that are absent are left out."""


def help_text(declared: DeclaredSettings) -> str:
    """Return the text of `serve --help`."""
    flags = {setting.flag for setting in declared.settings}
    lines = [
        "usage: edge-server serve --model-repository=DIR [--flag=value ...]",
        "       edge-server serve --demo",
        "",
        "Most used, each explained below:",
        *(f"  {given:27}{text}" for given, text in _MOST_USED.items() if given.partition("=")[0] in flags),
        "",
        "Flags override environment variables, which override the configuration file,",
        "which overrides the defaults. An empty variable counts as not set. A boolean",
        "flag without a value means true.",
        "",
        f"  {CONFIG_FLAG} <path>",
        f"        Configuration file in TOML. [{CONFIG_VARIABLE}]",
        f"  {PRINT_FLAG}",
        *_wrapped("Print the effective settings as a configuration file, each with its origin."),
        "  --help",
    ]
    section = ""
    for setting in declared.settings:
        if setting.section != section:
            section = setting.section
            lines += ["", f"{declared.titles[section]} (table [{section}] of a configuration file):"]
        lines += [f"  {setting.flag} <{setting.kind.metavar}>"]
        lines += _wrapped(setting.help)
        names = setting.variable
        if setting.separator:
            between = "spaces" if setting.separator == " " else f"'{setting.separator}'"
            names += f", {between} in between"
        if setting.field:
            names += f"; {setting.name}"
        default = default_text(setting)
        lines += _wrapped(f"[{names}{f'; default {default}' if default else ''}]")
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    """Return lines of 80 columns. No word is divided: flags, variables and paths are copied from them."""
    indent = " " * 8
    return textwrap.wrap(
        text, 80, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def default_text(setting: Setting) -> str:
    """Return the default of a setting as TOML, or "" if it is empty."""
    default = setting.default() if callable(setting.default) else setting.default
    return "" if default in ("", (), None, {}) else toml_text(default, setting.kind.show)
