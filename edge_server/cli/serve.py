"""`edge-server serve`: serve until SIGTERM or SIGINT, then drain and exit."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from edge_server.config import ServerConfig
from edge_server.config.merge_settings import parse_serve
from edge_server.config.printing import describe, help_text
from edge_server.config.setting_sources import process_environment, set_library_defaults
from edge_server.lazy_import import defer_import
from edge_server.telemetry.log import LogSettings, setup_logging
from edge_server.telemetry.service_manager import ServiceManager

log = logging.getLogger(__name__)

_ENDING_S = 1.0
"""How long threads are waited for that were told to end and may still be on their way."""


def run(arguments: Sequence[str]) -> int:
    """Serve as the arguments, the environment and the configuration file say; return the exit code."""
    set_library_defaults()
    parsed = parse_serve(arguments, process_environment())
    if parsed.asks_help:
        print(help_text())
        return 0
    if parsed.asks_print:
        print(describe(parsed))
        return 0
    settings = setup_logging(parsed.config.log)
    for warning in parsed.warnings:
        log.warning("%s", warning)
    manager = ServiceManager.from_environment(process_environment(), os.getpid())
    if manager.is_present:
        # The stacks of all threads, for the journal, when the watchdog bites with SIGABRT.
        faulthandler.enable()
    code = _serve(parsed.config, settings, manager, lambda: parse_serve(arguments, process_environment()).config)
    _end_if_held_up(code)
    return code


def _serve(
    config: ServerConfig, settings: LogSettings, manager: ServiceManager, read_again: Callable[[], ServerConfig]
) -> int:
    # numpy comes with the first model; of aiohttp the parts that serve are taken, not the client it would bring.
    defer_import("numpy")
    defer_import("aiohttp", has_free_parts=True)
    from edge_server.process.server import serve
    from edge_server.process.systemd_supervision import ProcessEnvironment

    return serve(config, settings, ProcessEnvironment(manager, read_again))


def _end_if_held_up(code: int) -> None:
    """End the process now if threads of models would keep it: the interpreter waits for all that are no daemons."""
    end_s = time.monotonic() + _ENDING_S
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    for thread in left:
        thread.join(max(0.0, end_s - time.monotonic()))
    left = [thread for thread in left if thread.is_alive()]
    if left:
        log.warning("ending with threads still running: %s", ", ".join(thread.name for thread in left))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
