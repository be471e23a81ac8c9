"""Not rclpy: see the README beside."""

from __future__ import annotations

from typing import Any


class Context:
    def __init__(self) -> None:
        self.is_running = False
        self.arguments: list[str] | None = None
        self.signal_handler_options: Any = None

    def init(self, args: list[str] | None, signal_handler_options: Any) -> None:
        assert not self.is_running, "Context.init() must only be called once"
        self.is_running = True
        self.arguments, self.signal_handler_options = args, signal_handler_options

    def get_domain_id(self) -> int:
        return 42

    def ok(self) -> bool:
        return self.is_running

    def shutdown(self) -> None:
        assert self.is_running, "rcl_shutdown already called"
        self.is_running = False

    def try_shutdown(self) -> None:
        self.is_running = False


default_context = Context()
