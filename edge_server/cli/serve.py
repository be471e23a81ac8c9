"""`edge-server serve`: serve models until SIGTERM or SIGINT, then let the open requests finish and exit. Its
flags are in `config/server_config.py`."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from edge_server.config import ServerConfig
from edge_server.config.merge_settings import parse_serve
from edge_server.config.print_config import describe
from edge_server.config.serve_help import help_text
from edge_server.config.setting_sources import process_environment, set_library_defaults
from edge_server.lazy_import import defer_import
from edge_server.plugin import Plugin, find_plugins
from edge_server.telemetry.log import LogSettings, setup_logging
from edge_server.telemetry.systemd_notify import ServiceManager

log = logging.getLogger(__name__)

_THREAD_END_S = 1.0
"""Time for threads to end after shutdown."""


def run(arguments: Sequence[str]) -> int:
    """Serve with the settings of arguments, environment and configuration file; return the exit code."""
    # Until `process.server.serve` enables it again: the start makes objects that stay, and collections only delay it.
    gc.disable()
    try:
        return _run(arguments)
    finally:
        gc.enable()


def _run(arguments: Sequence[str]) -> int:
    set_library_defaults()
    plugins, problems = find_plugins()
    parsed = parse_serve(arguments, process_environment(), plugins)
    if parsed.asks_help:
        print(help_text(parsed.declared))
        return 0
    if parsed.asks_print:
        print(describe(parsed))
        return 0
    settings = setup_logging(parsed.config.log)
    for warning in (*problems, *parsed.warnings):
        log.warning("%s", warning)
    manager = ServiceManager.from_environment(process_environment(), os.getpid())
    if manager.is_present:
        # When systemd's watchdog sends SIGABRT, write the stacks of all threads to the journal. Without an interpreter
        # lock only that of the main thread: the others run on, and to read their stacks ends in a segmentation fault.
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
        faulthandler.enable(all_threads=has_lock)

    def read_again() -> ServerConfig:
        return parse_serve(arguments, process_environment(), plugins).config

    code = _serve(parsed.config, settings, manager, read_again, plugins)
    _exit_if_threads_remain(code)
    return code


def _serve(
    config: ServerConfig,
    settings: LogSettings,
    manager: ServiceManager,
    read_again: Callable[[], ServerConfig],
    plugins: Sequence[Plugin],
) -> int:
    # numpy is imported with the first model, hpack with the first gRPC connection. Of aiohttp, only the server modules
    # are imported, not the client.
    defer_import("numpy")
    defer_import("hpack")
    defer_import("aiohttp", has_free_parts=True)
    from edge_server.process.server import serve
    from edge_server.process.systemd_supervision import ProcessEnvironment

    return serve(config, settings, ProcessEnvironment(manager, read_again), plugins)


def _exit_if_threads_remain(code: int) -> None:
    """Exit at once if threads of models still run. The interpreter would wait for all threads that are no daemons."""
    end_s = time.monotonic() + _THREAD_END_S
    running = [item for item in threading.enumerate() if not item.daemon and item is not threading.main_thread()]
    for thread in running:
        thread.join(max(0.0, end_s - time.monotonic()))
    running = [thread for thread in running if thread.is_alive()]
    if running:
        log.warning("ending with threads still running: %s", ", ".join(thread.name for thread in running))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
