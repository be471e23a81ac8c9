"""Registry of POSIX shared-memory regions that clients registered, mapped for reading and writing.

A client creates a segment, registers it once under a name, and then sends (name, offset, byte size) in place of tensor
bytes. A request pins its pieces while it runs. A region that is unregistered meanwhile accepts no new pins, and is
unmapped when the last pin is released.

The standard library's multiprocessing.shared_memory is unsuitable: its resource tracker deletes other owners' segments.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import stat
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from edge_server.core.status_reports import SharedRegion
from edge_server.errors import (
    AlreadyExists,
    EdgeServerError,
    InvalidRequest,
    NotFound,
    Refusal,
    ServingFault,
    Throttled,
    Unsupported,
)
from edge_server.memory.cuda_shared_memory import CudaMemoryRegistry, CudaPin, DeviceMemory
from edge_server.memory.region_pins import check_inside

SHM_FOLDER = "/dev/shm"
"""Folder of POSIX shared memory on Linux (shm_overview(7)). Segment "/x" is the file "x" in it."""

RESERVED_PREFIX = "triton_python_backend_shm_region_"
"""Prefix of the keys between Triton's server and its Python stubs. Triton refuses to map them for clients."""

_MAX_KEY_BYTES = 255  # NAME_MAX
_MAX_NAME_LENGTH = 1024


class _Region:
    """A mapped region. `pins` and `is_retired` are guarded by the registry's `lock`."""

    __slots__ = ("is_retired", "lock", "mapping", "memory", "pins", "readable", "report", "skew")

    def __init__(self, report: SharedRegion, mapping: mmap.mmap, skew: int, lock: threading.Lock) -> None:
        self.report = report
        self.mapping = mapping
        self.memory = memoryview(mapping)
        self.readable = self.memory.toreadonly()
        self.skew = skew  # bytes of the mapping before the region: mappings start at page boundaries
        self.lock = lock
        self.pins = 0
        self.is_retired = False

    def close(self) -> None:
        mapping = self.mapping
        # Pieces in cached request headers may refer to this object for long, but must not keep the memory.
        del self.mapping, self.memory, self.readable
        # BufferError: an array over a released pin still exists. Unmapping under it would turn the next read into a
        # segmentation fault. The array keeps the mapping alive until the array is freed.
        with contextlib.suppress(BufferError):
            mapping.close()


class RegionPiece:
    """Piece of a region, from `start` to before `stop` of `memory`. It keeps nothing mapped: a pin of the region must
    be held while it is used."""

    __slots__ = ("end", "region", "start", "stop")
    device = None
    """Not on a GPU."""

    def __init__(self, region: _Region, offset: int, byte_size: int) -> None:
        self.region = region
        self.end = region.report.offset + offset + byte_size
        """End in the client's segment."""
        self.start = region.skew + offset
        self.stop = self.start + byte_size

    @property
    def memory(self) -> memoryview:
        """The mapping, read-only."""
        return self.region.readable

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy `data`, of one-byte items, to the start of the piece. Raises InvalidRequest if the segment shrank
        meanwhile."""
        self.check_present()
        self.region.memory[self.start : min(self.start + len(data), self.stop)] = data

    def check_present(self) -> None:
        """Raise InvalidRequest when the client has truncated its segment so that the piece is no longer inside.

        Touching a page past the end of the file would end this process with SIGBUS. A truncation after the check still
        does, as do pages that a client gives back (a hole punched into the file) when /dev/shm is full. Closing that
        gap would need a read(2) copy of every tensor, which shared memory is there to avoid. Therefore clients must be
        trusted (see SharedMemoryRegistry).
        """
        region = self.region
        if (present := region.mapping.size()) < self.end:
            report = region.report
            raise InvalidRequest(
                f"Invalid offset + byte size for shared memory region: '{report.name}': {self.end} bytes of segment "
                f"'{report.key}' are needed, but it shrank to {present} bytes"
            )


class RegionHold:
    """Keeps regions mapped until `release`. They must be pinned already, once for each time that they are listed."""

    __slots__ = ("_lock", "_regions")

    def __init__(self, lock: threading.Lock, regions: Sequence[_Region]) -> None:
        self._lock = lock
        self._regions = regions

    def release(self) -> None:
        """Release the regions. May be called from any thread. Further calls do nothing."""
        idle: list[_Region] = []
        with self._lock:
            regions, self._regions = self._regions, ()
            for region in regions:
                region.pins -= 1
                if region.is_retired and not region.pins:
                    idle.append(region)
        for region in idle:
            region.close()


class RegionPin(RegionHold):
    """Piece of a region, kept mapped. `view` may be read (or written, if pinned for writing) until `release()`."""

    __slots__ = ("piece", "view")
    device = None
    """Not on a GPU."""

    def __init__(self, piece: RegionPiece, view: memoryview) -> None:
        super().__init__(piece.region.lock, (piece.region,))
        self.piece = piece
        self.view = view

    def release(self) -> None:
        """See RegionHold."""
        try:  # noqa: SIM105 - contextlib.suppress costs more than the rest of this function
            self.view.release()
        except BufferError:  # an array over the view still exists: see _Region.close
            pass
        super().release()

    def __enter__(self) -> RegionPin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy `data` to the start of the piece, which must be pinned for writing. Raises InvalidRequest if the segment
        shrank meanwhile."""
        self.piece.check_present()
        self.view[: memoryview(data).nbytes] = data


class RequestPieces:
    """The pieces that a request names, for further requests that name the same: found and checked once, then pinned for
    each request. They belong to registrations: after the end of one of these they are never pinned again."""

    __slots__ = ("_input_regions", "_last", "_lock", "_output_regions", "_regions", "inputs", "outputs")

    def __init__(self, inputs: Sequence[RegionPiece], outputs: Mapping[str, RegionPiece]) -> None:
        """The pieces, one at least, are of one registry."""
        self.inputs = inputs
        self.outputs = outputs
        self._input_regions = tuple(piece.region for piece in inputs)
        self._output_regions = tuple(piece.region for piece in outputs.values())
        self._regions = self._input_regions + self._output_regions
        self._lock = self._regions[0].lock
        last: dict[_Region, RegionPiece] = {}
        for piece in (*inputs, *outputs.values()):
            if piece.region not in last or last[piece.region].end < piece.end:
                last[piece.region] = piece
        self._last = tuple(last.values())
        """The last piece of each region: if it is present, so are the others."""

    def pin(self) -> tuple[RegionHold, RegionHold] | None:
        """Pin the inputs and the outputs. Return None, with nothing pinned, if a region is not registered any more or
        its segment shrank: `SharedMemoryRegistry.pin` finds the new one, or raises the error."""
        with self._lock:
            for region in self._regions:
                if region.is_retired:
                    return None
            for region in self._regions:
                region.pins += 1
        inputs, outputs = RegionHold(self._lock, self._input_regions), RegionHold(self._lock, self._output_regions)
        for piece in self._last:
            if piece.region.mapping.size() < piece.end:
                inputs.release()
                outputs.release()
                return None
        return inputs, outputs


class SharedMemoryRegistry:
    """Names of regions -> mapped memory. Thread-safe; no lock is held across a system call.

    With `is_allowed` False everything but `status` is refused. A client that may register can name any segment of this
    machine, and read and write it through the server, so clients must be trusted.

    `cuda` holds the regions on GPUs. Both kinds share one name space, and `pin` finds both.
    """

    def __init__(self, is_allowed: bool, cuda: CudaMemoryRegistry | None = None) -> None:
        self.is_allowed = is_allowed
        self.cuda = cuda or CudaMemoryRegistry(is_allowed, "this server was made without a GPU", _no_devices)
        self.cuda.is_taken = self._has
        self._lock = threading.Lock()
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map `byte_size` bytes from `offset` of the segment `key` ("/frames" or "frames") under `name`.

        Raises Unsupported (not allowed), InvalidRequest (key, offset, size, no such segment), AlreadyExists,
        ServingFault (the segment cannot be opened or mapped), Throttled (too many regions), Refusal (/dev/shm has not
        enough free memory for the pages of the region, which are allocated here).
        """
        self._check_allowed()
        if not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise InvalidRequest(f"a shared memory region's name has 1 to {_MAX_NAME_LENGTH} characters")
        if offset < 0 or byte_size <= 0:
            raise _invalid_registration(name, f"offset {offset}, byte size {byte_size}")
        path = _segment_path(name, key)
        with self._lock:
            self._check_free(name)
        region = _map(SharedRegion(name, key, offset, byte_size), path, self._lock)
        try:
            with self._lock:
                self._check_free(name)
                self._regions[name] = region
        except EdgeServerError:
            region.close()
            raise

    def unregister(self, name: str | None = None) -> None:
        """Unregister a region, or all of them for None and "". An unknown name is no error, as in Triton.

        Raises Unsupported when not allowed.
        """
        self._check_allowed()
        if name:
            self._retire([name])
        else:
            self.close()

    def close(self) -> None:
        """Unregister all regions at server shutdown, whether allowed or not."""
        with self._lock:
            names = list(self._regions)
        self._retire(names)

    def status(self, name: str | None = None) -> list[SharedRegion]:
        """Return one region, or for None and "" all, ordered by name. Raises NotFound."""
        with self._lock:
            if not name:
                return [region.report for _, region in sorted(self._regions.items())]
            region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [region.report]

    def pin(self, name: str, offset: int, byte_size: int, *, writable: bool = False) -> RegionPin | CudaPin:
        """Keep `byte_size` bytes from `offset` of the region mapped until the pin is released.

        The view is read-only unless `writable`. Raises Unsupported (not allowed), NotFound, InvalidRequest (outside
        the region, or the segment shrank).
        """
        self._check_allowed()
        with self._lock:
            region = self._regions.get(name)
            if region is not None:
                check_inside(region.report.name, region.report.byte_size, offset, byte_size)
                region.pins += 1
        if region is None:
            cuda = self.cuda.pin(name, offset, byte_size, writable=writable)
            if cuda is None:
                raise NotFound(f"Unable to find shared memory region: '{name}'")
            return cuda
        piece = RegionPiece(region, offset, byte_size)
        pin = RegionPin(piece, (region.memory if writable else region.readable)[piece.start : piece.stop])
        try:
            piece.check_present()
        except InvalidRequest:
            pin.release()
            raise
        return pin

    def _has(self, name: str) -> bool:
        with self._lock:
            return name in self._regions

    def _retire(self, names: list[str]) -> None:
        with self._lock:
            retired = [region for name in names if (region := self._regions.pop(name, None)) is not None]
            for region in retired:
                region.is_retired = True
            idle = [region for region in retired if region.pins == 0]
        for region in idle:
            region.close()

    def _check_allowed(self) -> None:
        if not self.is_allowed:
            raise Unsupported(
                "shared memory of clients is not allowed on this server; start it with --allow-client-shm=true"
            )

    def _check_free(self, name: str) -> None:
        if name in self._regions or self.cuda.has(name):
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        # Each mapping keeps a file descriptor. Half of them stay free for connections and model files.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        if 0 <= limit <= len(self._regions):
            raise Throttled(f"{len(self._regions)} shared memory regions are registered, no more fit; unregister some")


def _no_devices() -> DeviceMemory:
    raise OSError("there is no GPU")


def _segment_path(name: str, key: str) -> bytes:
    """Return the segment's file. Raises InvalidRequest for a key that is not a plain POSIX shared-memory name."""
    problem = ""
    base = key[1:] if key.startswith("/") else key
    encoded = base.encode("utf-8", "replace")
    if base in ("", ".", "..") or "/" in base or "\0" in base or encoded.decode() != base:
        problem = "it must be a name without '/' and NUL after an optional leading '/'"
    elif len(encoded) > _MAX_KEY_BYTES:
        problem = f"it is {len(encoded)} bytes long, {_MAX_KEY_BYTES} are allowed"
    elif base.startswith(RESERVED_PREFIX):
        problem = f"keys starting with '{RESERVED_PREFIX}' are reserved"
    if problem:
        raise InvalidRequest(f"cannot register shared memory region '{name}' with key {key[:300]!r}: {problem}")
    return os.path.join(SHM_FOLDER.encode(), encoded)


def _map(report: SharedRegion, path: bytes, lock: threading.Lock) -> _Region:
    try:
        # O_NONBLOCK: opening a FIFO placed there must not hang.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        is_clients = error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR)
        kind = InvalidRequest if is_clients else ServingFault
        raise kind(f"Unable to open shared memory region: '{report.key}': {error.strerror}") from error
    try:
        return _map_descriptor(report, descriptor, lock)
    finally:
        os.close(descriptor)  # the mapping keeps its own duplicate


def _map_descriptor(report: SharedRegion, descriptor: int, lock: threading.Lock) -> _Region:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(f"Unable to open shared memory region: '{report.key}': not a shared memory segment")
    # Checked before mmap, whose error is less clear, and before any number reaches C's integer types.
    if report.offset + report.byte_size > status.st_size:
        raise _invalid_registration(
            report.name,
            f"offset {report.offset} + byte size {report.byte_size}, segment '{report.key}' has {status.st_size} bytes",
        )
    try:
        # Clients make sparse segments. Touching a page that a full folder cannot give would end this process by SIGBUS.
        os.posix_fallocate(descriptor, report.offset, report.byte_size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(report) from None
        raise ServingFault(f"failed to register shared memory region '{report.name}': {error.strerror}") from error
    skew = report.offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(descriptor, report.byte_size + skew, mmap.MAP_SHARED, offset=report.offset - skew)
    except (OSError, ValueError) as error:  # ValueError: truncated since fstat
        raise ServingFault(f"failed to register shared memory region '{report.name}': {error}") from error
    return _Region(report, mapping, skew, lock)


def _no_space(report: SharedRegion) -> Refusal:
    folder = os.statvfs(SHM_FOLDER)
    total, free = (blocks * folder.f_frsize >> 20 for blocks in (folder.f_blocks, folder.f_bavail))
    return Refusal(
        f"failed to register shared memory region '{report.name}': segment '{report.key}' with "
        f"{report.byte_size / (1 << 20):.4g} MiB does not fit into {SHM_FOLDER} ({total} MiB, {free} MiB free); in "
        "Docker --shm-size makes it larger"
    )


def _invalid_registration(name: str, given: str) -> InvalidRequest:
    return InvalidRequest(
        f"failed to register shared memory region '{name}': invalid args: "
        f"Invalid offset + byte size for shared memory region: '{name}' ({given})"
    )
