"""Loader and session of the backend `c_abi`: opens a shared library (libmodel.so) with the C interface of
edge_backend.h, and calls it.

The library runs in the server's process, on the instance's thread, without the GIL. A crash of the library ends the
server. Any compiler can build it against the header beside this file. `python -c "import
edge_server.plugins.runtimes.c_library as here; print(*here.__path__)"` prints the folder:

    g++ -shared -fPIC -O2 -I<that folder> -o model_repository/my_model/1/libmodel.so my_model.cpp

`parameters` of config.pbtxt and `--backend-config=c_abi,key=value` are passed on unchanged. The library is loaded from
a private copy in TMPDIR, which must allow execution. Without the copy, overwriting the file in place would kill the
process, and the loader would not see a new file at an old path.
"""

from __future__ import annotations

import _ctypes
import ctypes
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.align_array import readable
from edge_server.backends.base import Array, Backend, ModelFile, ModelSignature, OpenJob, Session, SessionInfo
from edge_server.backends.describe_model import is_batchable, precision_of_tensors
from edge_server.backends.runtime_errors import existing_file, file_title, load_error, message_line
from edge_server.backends.shared_models import SharedModels, fingerprint
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, LoadError
from edge_server.plugins.runtimes.c_library.structs import (
    ABI_VERSION,
    Allocate,
    CTensor,
    CText,
    OpenArgs,
    RunArgs,
    Spec,
    c_strings,
    pack_strings,
    unpack_strings,
)

_REQUIRED = ("edge_backend_abi_version", "edge_model_open", "edge_model_run", "edge_model_close")
_BY_NUMBER = {dtype.number: dtype for dtype in DType}
_MAX_RANK = 32
_MAX_TENSORS = 1024
_TEXT_BYTES = 1024


def make(name: str) -> CLibraryBackend:
    return CLibraryBackend(name)


class CLibraryBackend(Backend):
    """Opens models. All instances of a version share the loaded library."""

    default_filename = "libmodel.so"
    names_parameters = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._shared: SharedModels[_Library] = SharedModels()

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        key, library = self._take_library(file)
        try:
            if not library.can_describe:
                return None
            handle = library.open(file, "", None, parameters)
            try:
                return library.describe(file, handle)
            finally:
                library.close(handle)
        finally:
            self._shared.give_back(key)

    def open(self, job: OpenJob) -> CLibrarySession:
        key, library = self._take_library(job.file)
        merged = {**job.settings, **job.spec.parameters}
        try:
            handle = library.open(job.file, job.instance_name, job.device_id, merged)
        except LoadError:
            self._shared.give_back(key)
            raise
        device = "CPU" if job.device_id is None else f"GPU:{job.device_id}"
        info = SessionInfo(f"c_abi {ABI_VERSION}", device, precision_of_tensors(job.spec))
        dtypes = {one.name: one.dtype for one in job.spec.inputs}
        dtypes.update({name: item.dtype for item in job.spec.batch_inputs for name in item.target_names})
        return CLibrarySession(job.spec.name, info, library, handle, dtypes, lambda: self._shared.give_back(key))

    def _take_library(self, file: ModelFile) -> tuple[Hashable, _Library]:
        path = existing_file(file, self.default_filename)
        key = fingerprint(path)
        return key, self._shared.take(key, lambda: _Library(file, path))


class _Library:
    """One loaded library. It is unloaded with the last reference."""

    def __init__(self, file: ModelFile, path: Path) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="edge-c-abi-") as folder:
                # The file is deleted after loading. The mapping stays valid.
                self._functions = ctypes.CDLL(str(shutil.copy(path, folder)))
        except OSError as error:
            failure = load_error(file, "c_abi", error)
        else:
            # Not at the interpreter's exit: an instance that is not closed by then may still run.
            weakref.finalize(self, _ctypes.dlclose, self._functions._handle).atexit = False
            self._check(file)
            return
        raise failure

    def _check(self, file: ModelFile) -> None:
        missing = [name for name in _REQUIRED if not hasattr(self._functions, name)]
        if missing:
            raise LoadError(f"{file_title(file)}: it lacks {', '.join(missing)}, which edge_backend.h asks for")
        self._functions.edge_backend_abi_version.restype = ctypes.c_uint32
        found = self._functions.edge_backend_abi_version()
        if found != ABI_VERSION:
            raise LoadError(f"{file_title(file)}: it is built for version {found} of edge_backend.h, not {ABI_VERSION}")
        self._functions.edge_model_close.restype = None
        for name in ("edge_model_open", "edge_model_run"):
            getattr(self._functions, name).restype = ctypes.c_int32
        self.can_describe = hasattr(self._functions, "edge_model_describe")
        if self.can_describe:
            self._functions.edge_model_describe.restype = ctypes.c_int32

    def open(
        self, file: ModelFile, instance: str, device_id: int | None, parameters: Mapping[str, str]
    ) -> ctypes.c_void_p:
        """Return the handle of a new instance. Raises LoadError."""
        args = OpenArgs(
            ctypes.sizeof(OpenArgs),
            file.model_dir.name.encode(),
            file.version,
            str(file.version_dir).encode(),
            instance.encode(),
            -1 if device_id is None else device_id,
            len(parameters),
            c_strings(parameters),
            c_strings(parameters.values()),
        )
        handle, said = ctypes.c_void_p(), _ErrorText()
        code = self._functions.edge_model_open(ctypes.byref(args), ctypes.byref(handle), said.argument)
        if code == 0 and handle:
            return handle
        reason = said.text(code) if code else "it gave no handle"
        raise LoadError(f"{file_title(file)}: edge_model_open failed: {reason}")

    def describe(self, file: ModelFile, handle: ctypes.c_void_p) -> ModelSignature:
        """Return the inputs and outputs that the model describes. Raises LoadError."""
        counts, said = (ctypes.c_uint32(), ctypes.c_uint32()), _ErrorText()
        lists = (ctypes.POINTER(Spec)(), ctypes.POINTER(Spec)())
        code = self._functions.edge_model_describe(
            handle, ctypes.byref(lists[0]), ctypes.byref(counts[0]), ctypes.byref(lists[1]), ctypes.byref(counts[1]),
            said.argument,
        )  # fmt: skip
        if code:
            raise LoadError(f"{file_title(file)}: edge_model_describe failed: {said.text(code)}")
        inputs = tuple(InputSpec(*one) for one in _described(file, "input", lists[0], counts[0].value))
        outputs = tuple(OutputSpec(*one) for one in _described(file, "output", lists[1], counts[1].value))
        return ModelSignature(inputs, outputs, is_batchable(inputs, outputs))

    def run(self, handle: ctypes.c_void_p, args: RunArgs) -> str:
        """Run one batch. Return "" for success, else the reason of the failure."""
        said = _ErrorText()
        code = self._functions.edge_model_run(handle, ctypes.byref(args), said.argument)
        return said.text(code) if code else ""

    def close(self, handle: ctypes.c_void_p) -> None:
        self._functions.edge_model_close(handle)


class _ErrorText:
    """The buffer for the reason of a failure (edge_text)."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._text = CText(ctypes.addressof(self._buffer), _TEXT_BYTES)
        self.argument = ctypes.byref(self._text)

    def text(self, code: int) -> str:
        # The whole buffer if the library wrote no zero at the end.
        said = self._buffer.raw.partition(b"\0")[0].decode(errors="replace")
        return " ".join(said.split()) or f"code {code}, without a reason"


def _described(file: ModelFile, role: str, specs: Any, count: int) -> list[tuple[str, DType, tuple[int, ...]]]:
    """Return name, type and dims of each tensor that the library describes. Raises LoadError."""
    if count > _MAX_TENSORS or (count and not specs):
        raise LoadError(f"{file_title(file)}: edge_model_describe tells of {count} {role}s and gives no such list")
    found = []
    for spec in specs[:count]:
        name = (spec.name or b"").decode(errors="replace")
        dtype = _BY_NUMBER.get(spec.datatype)
        if not name or dtype is None or not 0 <= spec.rank <= _MAX_RANK or (spec.rank and not spec.dims):
            raise LoadError(
                f"{file_title(file)}: edge_model_describe tells of an {role} '{name}' with datatype {spec.datatype} "
                f"and rank {spec.rank}: expected a name, a datatype of edge_backend.h and a rank of 0 to {_MAX_RANK}"
            )
        found.append((name, dtype, tuple(spec.dims[: spec.rank])))
    return found


class _OutputMemory:
    """The memory that one run allocated, by output."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.wanted = frozenset(wanted)
        self.problem = ""
        self.made: dict[str, tuple[DType, tuple[int, ...], Array]] = {}

    def allocate(
        self, _context: int | None, name: bytes | None, datatype: int, rank: int, dims: Any, byte_size: int
    ) -> int | None:
        """See edge_run_args in the header. The library calls it, so it must not raise."""
        text = (name or b"").decode(errors="replace")
        dtype = _BY_NUMBER.get(datatype)
        if text not in self.wanted or text in self.made:
            self.problem = f"it asked for memory for output '{text}', which is not asked for or was allocated before"
            return None
        if dtype is None or not 0 <= rank <= _MAX_RANK or (rank and not dims):
            self.problem = f"it gave output '{text}' the datatype {datatype} and the rank {rank}"
            return None
        shape = tuple(dims[:rank])
        if min(shape, default=0) < 0 or (dtype.itemsize and math.prod(shape) * dtype.itemsize != byte_size):
            self.problem = f"it gave output '{text}' {byte_size} bytes for {dtype.value} {list(shape)}"
            return None
        try:
            # At least one byte, as NULL means failure. Zeroed, so that it shows no data of other requests.
            memory = np.zeros(max(1, byte_size), np.uint8)
        except (MemoryError, ValueError, OverflowError):
            self.problem = f"there is no memory for the {byte_size} bytes of output '{text}'"
            return None
        self.made[text] = (dtype, shape, memory[:byte_size])
        return memory.ctypes.data

    def arrays(self) -> dict[str, Array]:
        """Return the outputs. Raises ValueError for malformed strings."""
        return {
            name: unpack_strings(name, memory, shape)
            if dtype is DType.BYTES
            else memory.view(dtype.numpy).reshape(shape)
            for name, (dtype, shape, memory) in self.made.items()
        }


class CLibrarySession(Session):
    """One instance: a handle of the library."""

    def __init__(
        self, model: str, info: SessionInfo, library: _Library, handle: ctypes.c_void_p, dtypes: Mapping[str, DType],
        give_back: Callable[[], None],
    ) -> None:  # fmt: skip
        self.info = info
        self._model = model
        self._library: _Library | None = library
        self._handle = handle
        self._dtypes = dtypes
        self._give_back = give_back

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._library is not None
        held = {
            name: pack_strings(array) if self._dtypes[name] is DType.BYTES else readable(array)
            for name, array in inputs.items()
        }
        tensors = (CTensor * max(1, len(held)))(
            *(_tensor(name, inputs[name].shape, data, self._dtypes[name]) for name, data in held.items())
        )
        memory = _OutputMemory(outputs)
        args = RunArgs(
            ctypes.sizeof(RunArgs), len(held), tensors, len(outputs), c_strings(outputs), Allocate(memory.allocate)
        )
        problem = self._library.run(self._handle, args)
        if memory.problem:
            problem = f"{memory.problem}; {problem}" if problem else memory.problem
        if not problem:
            try:
                return memory.arrays()
            except ValueError as error:
                problem = message_line(error)
        raise BackendError(f"model '{self._model}': edge_model_run failed: {problem}")

    def close(self) -> None:
        assert self._library is not None
        self._library.close(self._handle)
        self._library = None
        self._give_back()


def _tensor(name: str, shape: tuple[int, ...], data: Array, dtype: DType) -> CTensor:
    dims = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    return CTensor(name.encode(), dtype.number, len(shape), dims, data.ctypes.data, data.nbytes)
