"""Calling model of a pb_utils function: found by context variable, or by the calling code."""

from __future__ import annotations

import contextvars
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from edge_server.backends.base import Execution, ServerCalls
from edge_server.backends.python.deadlock_check import WaitGraph
from edge_server.backends.python.error_translation import TritonModelException
from edge_server.backends.python.module_loader import package_of


@dataclass(eq=False)
class Host:
    """One opened model, as the functions of the module see it. `package` is that of its modules. `waits` None: who
    waits for whom is found out elsewhere. `may_wait`: whether it may call other models while it executes; not on the
    thread of a front end, see `threads`. `folder` is where the model's file is."""

    model: str
    package: str
    server: ServerCalls | None
    waits: WaitGraph[Host] | None = None
    may_wait: bool = True
    folder: str = ""


@dataclass(eq=False)
class Batch:
    """What runs now. `holds_instance`: the instance is taken until the batch is done, so that whoever waits within it
    for the same instance waits forever."""

    host: Host
    executions: Sequence[Execution]
    holds_instance: bool = True

    def is_cancelled(self) -> bool:
        """Return whether nobody waits any more."""
        return bool(self.executions) and all(execution.is_cancelled() for execution in self.executions)

    @property
    def deadline_ns(self) -> int:
        """The latest of the requests' deadlines; 0 when one of them has none."""
        deadlines = [execution.request.deadline_ns for execution in self.executions]
        return max(deadlines) if deadlines and all(deadlines) else 0


current_batch: contextvars.ContextVar[Batch | None] = contextvars.ContextVar("edge_python_batch", default=None)
current_host: contextvars.ContextVar[Host | None] = contextvars.ContextVar("edge_python_host", default=None)

_hosts: weakref.WeakValueDictionary[str, Host] = weakref.WeakValueDictionary()


def enter(host: Host) -> None:
    """Make the host known to the code of its package. Forgotten with its last reference."""
    _hosts[host.package] = host


def find_host() -> Host | None:
    """Return the model that calls: by context on its instance's thread and in its coroutines, else by its code."""
    host = current_host.get()
    return host if host is not None else _hosts.get(package_of(sys._getframe(1)))


def get_model_dir() -> str:
    """Return the folder of the model's file: that of its version. Raises TritonModelException outside of models."""
    host = find_host()
    if host is None or not host.folder:
        raise TritonModelException("get_model_dir: called by no model that a server runs")
    return host.folder
