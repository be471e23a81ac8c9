"""Settings of this package's plugins, for the message about a plugin that is not installed."""

from __future__ import annotations

from collections.abc import Mapping

PLUGIN_OF: Mapping[str, str] = {
    name: plugin
    for plugin, names in {
        "governor": (
            "governor", "--governor", "--power-budget-watts", "--temperature-limit", "--control-floor-percent",
            "--governor-interval-ms", "--governor-load-wait-secs", "--sysfs-root", "--grant-clock-cap",
        ),
    }.items()
    for name in names
}  # fmt: skip
"""Table or flag -> the plugin that declares it. tests/config compares it with the plugins."""


def missing_plugin(name: str, shown: str = "") -> str:
    """Return the error for a setting whose plugin is not installed, given its table or flag; "" for an unknown one."""
    plugin = PLUGIN_OF.get(name)
    if plugin is None:
        return ""
    return (
        f"{shown or name} needs the plugin '{plugin}', which is not in this installation: "
        "pip install --force-reinstall --no-deps edge-server"
    )
