"""Interface of plugins: base classes for the optional parts of the server, which the core finds in `plugins/` and in
other packages.

A plugin is a folder `edge_server/plugins/NAME` whose module `plugin` has an object PLUGIN, or an object that another
package names as an entry point of the group `edge_server.plugins`. The object is of a subclass of `Plugin`. Its module
is imported at each start, so it imports only the standard library, this module, `edge_server.config.setting` and its
own settings. It imports all else inside its methods.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from edge_server.own_plugins import ModelFormat as ModelFormat
from edge_server.own_plugins import plugin_objects
from edge_server.record import record

if TYPE_CHECKING:
    from edge_server.backends.trial_engines import TrialEngineSettings
    from edge_server.config import ServerConfig
    from edge_server.config.setting import SettingTable
    from edge_server.core.model_spec import ModelFile, ModelSpec
    from edge_server.core.version_lifecycle import FolderReader, OutputCheck, Recogniser, SampleRun
    from edge_server.errors import EdgeServerError
    from edge_server.frontends.grpc.rpc_table import StreamService
    from edge_server.frontends.http.access_check import AccessCheck
    from edge_server.frontends.http.inference_route import BodyDecoder
    from edge_server.frontends.http.request_head import RequestHead
    from edge_server.frontends.http.routes import Route
    from edge_server.repository.choice.runtime_times import RuntimeTimes
    from edge_server.service import InferenceService
    from edge_server.serving.execution.admission_control import AdmissionControl
    from edge_server.telemetry.event_bus import EventBus
    from edge_server.telemetry.metrics_page import Family
    from edge_server.telemetry.trace_record import TraceExport

log = logging.getLogger(__name__)

LoadCheck = Callable[["ModelFile", int], "str | None"]
"""Given a model's file and the number of instances: the reason not to load it now, or None."""

ENTRY_POINTS = "edge_server.plugins"


COMMAND_GROUPS = ("Models", "A running server", "Cameras, robots and chats", "Measurement", "Shell")
"""Headings of commands in `edge-server --help`, in this order."""


@record(frozen=True, slots=True)
class Command:
    """Command of the program: `run(arguments) -> exit code` in `module`, which is imported for the call."""

    name: str
    summary: str
    module: str
    group: str = "Others"
    """Heading in `edge-server --help`; see COMMAND_GROUPS."""


class StatusRow(NamedTuple):
    """A line of `edge-server status`. `state` is "ok", "warning" or "failed"; `text` says more.

    A line without a title belongs to the one above.
    """

    title: str
    state: str
    text: str


class StatusTable(NamedTuple):
    """A table of `edge-server status`. Columns of `optional` are omitted on a narrow terminal, the first one first."""

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    optional: Sequence[str] = ()


StatusPart = StatusRow | StatusTable


class ServingCore(NamedTuple):
    """What a plugin may use of a server. It may keep it until its `stop` has returned."""

    service: InferenceService
    config: ServerConfig
    events: EventBus
    admission: AdmissionControl
    """Refuses work for now. Requests ask it themselves; for a plugin that has costly work before its requests."""
    mark_gpu_lost: Callable[[str | None, str], None]
    """Handle the loss of a GPU, given its UUID (None: the only one) and the reason."""
    access: AccessCheck
    """What callers of HTTP may do."""
    ports: Mapping[str, int]
    """The open ports by name: http, grpc, metrics."""
    panels: Callable[[], Mapping[str, Path]]
    """`RunningPlugin.panel` of each plugin that has one."""
    gauges: Callable[[], Mapping[str, float]]
    """`RunningPlugin.gauges` of all plugins."""
    control_need: Callable[[], float]
    """The sum of `RunningPlugin.control_need` of all plugins."""
    lost_gpus: Callable[[], Mapping[int, str]]
    """GPUs that this process can no longer use, with the reason."""
    heavy_work_refusal: Callable[[], str]
    """The reason why no heavy work in the background may begin now; "" if it may."""
    runtime_times: RuntimeTimes | None
    """Measured times that choose the runtime of a model. None without a state folder."""
    machine_root: Path
    """Folder with the /sys, /proc and /etc that describe the machine."""


class RunningPlugin:
    """A plugin in one server. Its methods are called in this order: `build`, `start`, `before_first_scan`,
    `models_known`, `models_settled`, `begin_stop`, `stop`. Of them `edge-server check` calls only `build`,
    `before_first_scan` and `stop`. All have a default that does nothing.

    A ConfigError or EdgeServerError of `prepare` and of the methods until `before_first_scan` ends the start. After any
    other exception, which is logged and shown in `status`, the server goes on without the plugin.
    """

    # Read before the service is made.
    admission: AdmissionControl | None = None
    model_checks: Sequence[Callable[[ModelSpec], object]] = ()
    """Get each complete specification. They raise BadModelConfig for parameters that this plugin reads and refuses."""
    output_checks: Sequence[Callable[[ModelSpec], OutputCheck | None]] = ()
    """As `model_checks`. They return the check of the warmed-up model's answer, or None."""
    folder_readers: Sequence[FolderReader] = ()
    """Get each complete specification and the model's folder, before the checks. They return the specification with
    what they read there, and raise BadModelConfig."""
    body_decoders: Mapping[str, BodyDecoder] = MappingProxyType({})
    """Beginning of a content type -> decoder of such bodies of inference requests over HTTP."""
    local_folders: Mapping[str, Path] = MappingProxyType({})
    """Model repository given as an address -> the folder that is scanned in its place."""
    panel: Path | None = None
    """ES module of a section of the page, see docs/plugins.md. It may import the files `panel_*.js` beside it."""
    onnx_backends: Sequence[str] = ()
    """Backends for ONNX files whose configuration names none. They are tried before those of the core."""
    backend_settings: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """Backend -> settings of it, which the configuration may override."""
    machine_root: Path | None = None
    """Folder with the /sys, /proc and /etc that describe the machine; None: this plugin does not choose it."""
    make_trace_export: Callable[[], TraceExport] | None = None
    """For trace mode opentelemetry."""

    def make_load_check(self, check_memory: LoadCheck) -> LoadCheck:
        """Return the check before each load, which returns the reason not to load a model file now. `check_memory` is
        the check without this plugin. The check may wait."""
        return check_memory

    def heavy_work_refusal(self) -> str:
        """Return the reason why no heavy work in the background, as an engine build, may begin now; "" if it may."""
        return ""

    def build(self, core: ServingCore) -> None:
        """Make what needs the serving core. No thread, port or device is opened."""

    def examine(self, spec: ModelSpec, run: SampleRun | None) -> Sequence[str]:
        """Return warnings about a loaded model, for `edge-server check`, which has more time than a load. `run` runs
        the model with given inputs; None for a model that is not run without a request."""
        return ()

    def refusals(self) -> Sequence[str]:
        """Return the errors in files that the server reads after its start, for `edge-server check`.

        Opens no device and no connection.
        """
        return ()

    def start(self) -> None:
        """Start threads, and open ports of other wires than HTTP and gRPC, which open later. Called on the server's
        event loop."""

    def before_first_scan(self) -> None:
        """Wait until the model repositories can be scanned. *Blocking*, until `stop` is called at most. Called on a
        thread, also by `edge-server check`. Raises EdgeServerError."""

    def models_known(self) -> None:
        """The models to serve are known; their loads have just begun. Called on a thread."""

    def models_settled(self) -> None:
        """Each model of the start is loaded or has failed."""

    def begin_stop(self) -> None:
        """The server is about to refuse requests. *Blocking* for a few seconds at most."""

    def stop(self, timeout_s: float) -> None:
        """End everything. *Blocking* for `timeout_s` at most. The models are closed by now. Legal without `start`."""

    def families(self) -> Iterable[Family]:
        """Return metric families for the metrics page."""
        return ()

    def routes(self) -> Sequence[Route]:
        """Return routes of HTTP. Called once, before the port opens."""
        return ()

    def refusal_body(self, head: RequestHead, error: EdgeServerError) -> bytes | None:
        """Return the body of the HTTP response that refuses a request before a handler runs, also one whose path has no
        route; None for the usual JSON object. For an API with a form of its own for errors."""
        return None

    def rpcs(self) -> Sequence[StreamService]:
        """Return services of gRPC, whose messages `protocol` describes. Called once, before the port opens."""
        return ()

    def addresses(self) -> Sequence[str]:
        """Return the addresses that `start` has opened, for the line that says that the server is ready."""
        return ()

    def gauges(self) -> Mapping[str, float]:
        """Return current values by name, of which the page shows the last half hour. Called every few seconds; returns
        at once."""
        return {}

    def control_need(self) -> float:
        """Return the seconds of computing per second that control work of this plugin needs now, infinite if it is not
        known yet. It keeps them on a machine that is too hot. Called by other threads, also for requests; returns at
        once."""
        return 0.0

    def status(self) -> Sequence[StatusPart]:
        """Return the plugin's part of `edge-server status`. Called on a worker thread, as is `reports`."""
        return ()

    def reports(self) -> Mapping[str, object]:
        """Return plain JSON by name, which `edge-server status --json` adds to its output."""
        return {}

    def health_headers(self) -> Mapping[str, str]:
        """Return headers for the answer to GET /v2/health/ready."""
        return {}

    def problem(self) -> str:
        """Return why the service manager should restart the process, "" while all is well. Called by its watchdog."""
        return ""


class Plugin:
    """What a plugin brings. One object serves all servers of a process, so it has no state."""

    name: str
    tables: Sequence[SettingTable] = ()
    """Tables of settings, in the configuration file and as flags."""
    commands: Sequence[Command] = ()
    recognisers: Sequence[Recogniser] = ()
    """Get each complete specification and the metadata of its file, before the checks. The first result is taken. Also
    used without a server, when a new model is added or tried."""
    machine_checks: Sequence[str] = ()
    """Checks of `edge-server doctor`, "module:function" each: gets the folder (Path) with the /sys, /proc and /etc of
    the machine, and returns findings (`core.finding`)."""
    machine_facts: Mapping[str, str] = MappingProxyType({})
    """Name -> "module:function" that asks a driver and returns its answer as JSON, for `doctor --collect`. It runs in a
    process of its own, because a broken driver hangs or ends it."""
    backends: Mapping[str, str] = MappingProxyType({})
    """Backend -> module with a function `make(name) -> Backend`. Read only of plugins of this package: others have the
    entry points `edge_server.backends`, which also processes find that know no plugins."""
    data_backends: Sequence[str] = ()
    """Those of `backends` whose model files are data: opening or running one runs no code of its author. Another
    machine may send files for these without `--allow-code-upload`."""
    engine_backends: Sequence[str] = ()
    """Those of `backends` that serve an ONNX file through an engine, which is built first. Until then another runtime
    serves the file."""
    model_formats: Sequence[ModelFormat] = ()
    """Formats of model files that `backends` read. Read only of plugins of this package, as are the next three."""
    platforms: Mapping[str, str] = MappingProxyType({})
    """Further platforms of Triton -> the backend that serves them."""
    distributions: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Backend -> Python packages that bring its runtime, where measured times choose it: they count for one version."""
    address_schemes: Sequence[str] = ()
    """Schemes of the addresses of model repositories that this plugin copies, for the error about another one."""
    is_required = False
    """Whether a server is not ready if this plugin fails in it."""
    after: Sequence[str] = ()
    """Names of plugins that are prepared, built and started before this one, if they are there."""

    def parameter_names(self) -> Iterable[str]:
        """Return the names of models' `parameters` that this plugin declares, for warnings about misspelt ones. Read
        only of plugins of this package, when a name is not one of the core's."""
        return ()

    def trial_engines(self, config: ServerConfig) -> TrialEngineSettings | None:
        """Return how the `engine_backends` build engines for the trial of a model outside of a server. Read only of
        plugins of this package."""
        return None

    def check(self, config: ServerConfig) -> Sequence[str]:
        """Return warnings about settings that are valid but probably not intended. Raises ConfigError."""
        return ()

    def prepare(self, config: ServerConfig) -> RunningPlugin | None:
        """Return the plugin for one server, or None if this configuration does not want it. Opens nothing."""
        return None


class FoundPlugins(NamedTuple):
    plugins: tuple[Plugin, ...]
    """Those of `after` first."""
    problems: tuple[str, ...]
    """Why others are missing, each a sentence."""


def own_plugins() -> tuple[Plugin, ...]:
    """Return the plugins of this package: the folders in `plugins/` that are there."""
    return _in_order(plugin_objects())


def own_recognisers() -> tuple[Recogniser, ...]:
    """Return the recognisers of the plugins of this package."""
    return tuple(recognise for plugin in own_plugins() for recognise in plugin.recognisers)


def find_plugins() -> FoundPlugins:
    """Return the plugins of this package and of other installed packages.

    Looking through all installed packages takes long: only for what needs all settings or commands.
    """
    if not _is_any_installed():
        return FoundPlugins(own_plugins(), ())
    from importlib.metadata import entry_points

    plugins, problems = list(own_plugins()), []
    for entry in sorted(entry_points(group=ENTRY_POINTS)):
        if any(plugin.name == entry.name for plugin in plugins):
            problems.append(f"plugin '{entry.name}' ({entry.value}) is ignored: the name is taken")
            continue
        try:
            plugins.append(entry.load())
        except Exception as error:  # noqa: BLE001 - foreign code runs at its import
            reason = f"{type(error).__name__}: {error}"
            problems.append(f"plugin '{entry.name}' ({entry.value}) cannot be imported: {reason}")
    return FoundPlugins(_in_order(plugins), tuple(problems))


def _is_any_installed() -> bool:
    """Return whether a package has an entry point for plugins. `importlib.metadata` needs a megabyte to say so, and
    globs of pathlib twice the time."""
    group = f"[{ENTRY_POINTS}]".encode()
    for folder in sys.path:
        with contextlib.suppress(OSError), os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                if entry.name.endswith("-info"):
                    with contextlib.suppress(OSError), open(f"{entry.path}/entry_points.txt", "rb") as file:
                        if group in file.read():
                            return True
    return False


def _in_order(plugins: Iterable[Plugin]) -> tuple[Plugin, ...]:
    """Return the plugins with each one behind those of its `after`. A circle is a defect of the plugins."""
    from graphlib import TopologicalSorter

    by_name = {plugin.name: plugin for plugin in plugins}
    graph = {name: [other for other in plugin.after if other in by_name] for name, plugin in by_name.items()}
    return tuple(by_name[name] for name in TopologicalSorter(graph).static_order())
