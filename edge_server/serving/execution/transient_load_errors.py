"""Classification of load errors: those that may disappear without a change of the model's files are retried."""

from __future__ import annotations

import errno

from edge_server.errors import (
    BackendMissing,
    ChangedWhileLoading,
    DeviceLost,
    EdgeServerError,
    LoadError,
    MemberMissing,
    OutOfMemory,
    StorageFault,
)

TRANSIENT_ERRORS = (OutOfMemory, StorageFault, ChangedWhileLoading)
"""Errors that may disappear without a change of the model's files. Such loads are retried with growing delays. A
missing runtime is not one of them: after its installation the operator loads the model or restarts the server."""

MACHINE_ERRORS = (*TRANSIENT_ERRORS, BackendMissing, DeviceLost, MemberMissing)
"""Errors that say nothing against the model's files: what this machine lacks now, it may have later."""

_TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ENFILE, errno.EMFILE, errno.ETIMEDOUT})


def as_transient(error: LoadError | OSError) -> EdgeServerError:
    """Return the error as a StorageFault if a temporary disk or file system error caused it.

    Any other OSError becomes a LoadError.
    """
    cause: BaseException | None = error
    for _ in range(8):
        if isinstance(cause, OSError) and cause.errno in _TRANSIENT_ERRNOS:
            return StorageFault(str(error))
        cause = None if cause is None else cause.__cause__ or cause.__context__
    return error if isinstance(error, LoadError) else LoadError(f"{type(error).__name__}: {error}")
