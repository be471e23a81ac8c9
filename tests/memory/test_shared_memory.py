import contextlib
import gc
import mmap
import os
import resource
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
import tritonclient.utils.shared_memory as client

from edge_server.core.status_reports import SharedRegion
from edge_server.errors import AlreadyExists, ErrorCode, InvalidRequest, NotFound, Throttled, Unsupported
from edge_server.memory.shared_memory import RequestPieces, SharedMemoryRegistry

PAGE = mmap.ALLOCATIONGRANULARITY


@pytest.fixture
def registry():
    registry = SharedMemoryRegistry(is_allowed=True)
    yield registry
    registry.close()


class Segment:
    """A file in /dev/shm, as a client of another language would make it."""

    def __init__(self, size):
        self.key = f"edge_test_{uuid.uuid4().hex}"
        self.path = Path("/dev/shm") / self.key
        self.path.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))

    def is_mapped(self):
        return self.key in Path("/proc/self/maps").read_text()

    def is_open(self):
        links = []
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return str(self.path) in links


@pytest.fixture
def segment():
    segment = Segment(4 * PAGE)
    yield segment
    segment.path.unlink(missing_ok=True)


def test_a_region_of_tritons_client_is_read_and_written(registry):
    key = f"/edge_test_{uuid.uuid4().hex}"
    handle = client.create_shared_memory_region("ours", key, 64)
    try:
        client.set_shared_memory_region(handle, [np.arange(16, dtype=np.float32)])
        registry.register("frames", key, 0, 64)
        with registry.pin("frames", 8, 16) as pin:
            assert np.frombuffer(pin.view, np.float32).tolist() == [2, 3, 4, 5]
            assert pin.view.readonly
        with registry.pin("frames", 32, 32, writable=True) as pin:
            np.frombuffer(pin.view, np.float32)[:] = 7
        assert client.get_contents_as_numpy(handle, np.float32, [16]).tolist() == [*range(8), *[7] * 8]
    finally:
        client.destroy_shared_memory_region(handle)


def test_a_registration_allocates_the_pages_of_its_region_and_no_other(registry, segment):
    segment.path.write_bytes(b"")
    os.truncate(segment.path, 4 * PAGE)  # as tritonclient does: the pages are allocated by the first use
    registry.register("frames", segment.key, PAGE + 8, PAGE)
    assert segment.path.stat().st_blocks * 512 == 2 * PAGE


FULL = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
from edge_server.errors import Refusal
from edge_server.memory.shared_memory import SharedMemoryRegistry

registry = SharedMemoryRegistry(is_allowed=True)
for name in ("in", "out"):
    with open(f"/dev/shm/{name}", "wb") as file:
        file.truncate(40 << 20)
registry.register("in", "in", 0, 40 << 20)
try:
    registry.register("out", "out", 0, 40 << 20)
except Refusal as error:
    print(error.message)
registry.register("out", "out", 0, 24 << 20)  # exactly full now
with registry.pin("out", 0, 24 << 20, writable=True) as pin:
    pin.write(bytes(24 << 20))
with registry.pin("in", 0, 40 << 20) as pin:
    print(bytes(pin.view).count(0))
"""


def has_namespaces():
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif("not has_namespaces()", reason="needs unshare, and permission to make mount namespaces")
def test_a_region_that_a_full_folder_cannot_hold_is_refused_and_the_process_survives():
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "failed to register shared memory region 'out': segment 'out' with 40 MiB does not fit into /dev/shm (64 MiB, "
        "24 MiB free); in Docker --shm-size makes it larger",
        str(40 << 20),
    ]


def test_a_region_of_another_process_outlives_that_process_and_our_use(registry):
    key = f"edge_test_{uuid.uuid4().hex}"
    program = (
        "import sys, numpy as np, tritonclient.utils.shared_memory as client\n"
        "handle = client.create_shared_memory_region('r', sys.argv[1], 8)\n"
        "client.set_shared_memory_region(handle, [np.array([5, 6], np.int32)])\n"
        "sys.stdout.write('made'); sys.stdout.flush(); sys.stdin.read()\n"
        "client.destroy_shared_memory_region(handle)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "/" + key], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.read(4) == b"made"
        registry.register("r", "/" + key, 0, 8)
        registry.unregister("r")
        assert (Path("/dev/shm") / key).exists(), "unregistering never deletes a client's segment"
        registry.register("r", key, 0, 8)
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()
    with registry.pin("r", 0, 8) as pin:
        assert np.frombuffer(pin.view, np.int32).tolist() == [5, 6]


def test_status_lists_regions_by_name_and_names_the_missing(registry, segment):
    registry.register("b", segment.key, 0, 10)
    registry.register("a", "/" + segment.key, PAGE, 20)
    a, b = SharedRegion("a", "/" + segment.key, PAGE, 20), SharedRegion("b", segment.key, 0, 10)
    assert registry.status() == registry.status("") == [a, b]
    assert registry.status("b") == [b]
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'c'"):
        registry.status("c")


@pytest.mark.sample(3)
@pytest.mark.parametrize("offset", [0, 1, 255, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 8])
def test_regions_may_start_anywhere_in_a_page(registry, segment, offset):
    registry.register("r", segment.key, offset, PAGE)
    with registry.pin("r", 3, 5) as pin:
        assert bytes(pin.view) == segment.path.read_bytes()[offset + 3 : offset + 8]
    with registry.pin("r", PAGE - 1, 1, writable=True) as pin:
        pin.view[0] = 99
    assert segment.path.read_bytes()[offset + PAGE - 1] == 99


def test_an_input_view_cannot_be_written(registry, segment):
    registry.register("r", segment.key, 0, 8)
    with registry.pin("r", 0, 8) as pin:
        with pytest.raises(TypeError):
            pin.view[0] = 1
        assert not np.frombuffer(pin.view, np.uint8).flags.writeable


def test_a_name_is_taken_once(registry, segment):
    registry.register("r", segment.key, 0, 8)
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        registry.register("r", segment.key, 0, 8)
    registry.unregister("r")
    registry.register("r", segment.key, 0, 8)


def test_unregistering_unmaps_closes_and_forgets(registry, segment):
    registry.register("r", segment.key, 0, 8)
    registry.register("s", segment.key, PAGE, 8)
    assert segment.is_mapped()
    registry.unregister()
    assert not segment.is_mapped()
    assert not segment.is_open()
    assert registry.status() == []
    registry.unregister("")
    registry.unregister("never there")


def test_a_region_in_use_refuses_new_use_and_is_unmapped_after_the_last_pin(registry, segment):
    registry.register("r", segment.key, 0, 8)
    first, second = registry.pin("r", 0, 8), registry.pin("r", 4, 4)
    registry.unregister("r")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        registry.pin("r", 0, 8)
    first.release()
    first.release()
    assert segment.is_mapped()
    assert bytes(second.view) == bytes([4, 5, 6, 7])
    second.release()
    assert not segment.is_mapped()
    assert not segment.is_open()


def test_the_name_of_a_region_in_use_can_be_registered_anew(registry, segment):
    registry.register("r", segment.key, 0, 8)
    pin = registry.pin("r", 0, 8)
    registry.unregister("r")
    registry.register("r", segment.key, 8, 8)
    pin.release()
    with registry.pin("r", 0, 1) as other:
        assert other.view[0] == 8


def test_a_released_view_is_refused_instead_of_read(registry, segment):
    registry.register("r", segment.key, 0, 8)
    pin = registry.pin("r", 0, 8)
    pin.release()
    with pytest.raises(ValueError):
        bytes(pin.view)


def test_an_array_that_outlives_its_pin_keeps_its_memory_and_frees_it_at_last(registry, segment):
    registry.register("r", segment.key, 0, 8)
    pin = registry.pin("r", 0, 8)
    array = np.frombuffer(pin.view, np.uint8)
    registry.unregister("r")
    pin.release()
    assert array.tolist() == [*range(8)]
    del array, pin
    gc.collect()
    assert not segment.is_mapped()


@pytest.mark.parametrize(("offset", "size"), [(0, 17), (1, 16), (8, 2**63), (0, -1), (15, 2), (0, 2**64)])
def test_a_piece_must_end_inside_its_region(registry, segment, offset, size):
    registry.register("r", segment.key, 0, 16)
    with pytest.raises(InvalidRequest, match=r"Invalid offset \+ byte size for shared memory region: 'r'"):
        registry.pin("r", offset, size)


@pytest.mark.parametrize("offset", [16, 17, -1, 2**63, 2**64 - 1])
def test_a_piece_must_start_inside_its_region(registry, segment, offset):
    registry.register("r", segment.key, 0, 16)
    with pytest.raises(InvalidRequest, match="Invalid offset for shared memory region: 'r'"):
        registry.pin("r", offset, 1)


def test_an_empty_piece_is_allowed(registry, segment):
    registry.register("r", segment.key, 0, 16)
    with registry.pin("r", 3, 0) as pin:
        assert len(pin.view) == 0


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 4 * PAGE + 1), (4 * PAGE, 1), (1, 4 * PAGE), (0, 0), (0, -1), (-1, 5), (2**63, 1), (1, 2**64), (2**70, 2**70)],
)
def test_a_region_must_lie_inside_its_segment(registry, segment, offset, size):
    with pytest.raises(InvalidRequest, match=r"Invalid offset \+ byte size for shared memory region: 'r'"):
        registry.register("r", segment.key, offset, size)
    assert registry.status() == []
    assert not segment.is_open()


def test_a_segment_that_shrank_while_it_was_pinned_is_not_written(registry, segment):
    registry.register("r", segment.key, PAGE, PAGE)
    with registry.pin("r", 0, PAGE, writable=True) as pin:
        os.truncate(segment.path, PAGE)
        with pytest.raises(InvalidRequest, match=f"'r': {2 * PAGE} bytes .* shrank to {PAGE} bytes"):
            pin.write(b"x")


def test_a_segment_that_shrank_is_refused_at_the_pin(registry, segment):
    registry.register("r", segment.key, 0, 4 * PAGE)
    os.truncate(segment.path, PAGE)
    with pytest.raises(InvalidRequest, match=f"shrank to {PAGE} bytes"):
        registry.pin("r", PAGE, 1)
    with registry.pin("r", 0, PAGE) as pin:
        assert pin.view[1] == 1
    registry.unregister("r")
    assert not segment.is_mapped(), "the refused pin holds nothing"


def pieces_of(registry, *, name="r", size=8):
    """Return the pieces of a request that reads the first bytes of a region, and writes those behind them."""
    with registry.pin(name, 0, size) as given, registry.pin(name, size, size, writable=True) as wanted:
        return RequestPieces([given.piece], {"y": wanted.piece})


def test_pieces_are_pinned_for_each_request_and_hold_the_region_meanwhile(registry, segment):
    registry.register("r", segment.key, 0, PAGE)
    pieces = pieces_of(registry)
    for _ in range(2):
        inputs, outputs = pieces.pin()
        (given,), wanted = pieces.inputs, pieces.outputs["y"]
        assert bytes(given.memory[given.start : given.stop]) == bytes(range(8))
        assert given.memory.readonly
        wanted.write(b"\7\7")
        assert segment.path.read_bytes()[:12] == bytes([*range(8), 7, 7, 10, 11])
        outputs.release()
        inputs.release()
        inputs.release()
    inputs, outputs = pieces.pin()
    registry.unregister("r")
    inputs.release()
    inputs.release()
    assert segment.is_mapped()
    outputs.release()
    assert not segment.is_mapped()
    assert not segment.is_open()


def test_pieces_are_never_pinned_again_after_their_registration(registry, segment):
    registry.register("r", segment.key, 0, PAGE)
    pieces = pieces_of(registry)
    registry.unregister("r")
    assert not segment.is_mapped(), "pieces that wait for the next request hold nothing"
    assert pieces.pin() is None
    registry.register("r", segment.key, 0, PAGE)
    assert pieces.pin() is None
    registry.unregister()
    assert not segment.is_mapped()


@pytest.mark.parametrize(("left", "is_pinned"), [(16, True), (15, False), (7, False), (0, False)])
def test_pieces_of_a_segment_that_shrank_are_not_pinned(registry, segment, left, is_pinned):
    registry.register("r", segment.key, 0, PAGE)
    pieces = pieces_of(registry)
    os.truncate(segment.path, left)
    holds = pieces.pin()
    assert (holds is not None) == is_pinned
    for hold in holds or ():
        hold.release()
    registry.unregister()
    assert not segment.is_mapped(), "what was not pinned holds nothing"


def test_a_piece_of_a_segment_that_shrank_while_it_was_pinned_is_not_written(registry, segment):
    registry.register("r", segment.key, 0, 2 * PAGE)
    pieces = pieces_of(registry, size=PAGE)
    holds = pieces.pin()
    os.truncate(segment.path, PAGE)
    with pytest.raises(InvalidRequest, match=f"'r': {2 * PAGE} bytes .* shrank to {PAGE} bytes"):
        pieces.outputs["y"].write(b"x")
    for hold in holds:
        hold.release()


def test_no_more_than_its_bytes_are_written_to_a_piece(registry, segment):
    registry.register("r", segment.key, 0, PAGE)
    pieces = pieces_of(registry)
    holds = pieces.pin()
    with pytest.raises(ValueError):
        pieces.outputs["y"].write(bytes(9))
    assert segment.path.read_bytes()[:24] == bytes(range(24))
    for hold in holds:
        hold.release()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "key",
    ["", "/", "//x", "a/b", "/a/b", "../etc/passwd", "..", "/..", ".", "a\0b", "/a/", "x" * 256, "\ud800"],
)
def test_keys_that_are_no_plain_names_are_refused(registry, key):
    with pytest.raises(InvalidRequest, match="cannot register shared memory region 'r' with key"):
        registry.register("r", key, 0, 8)


@pytest.mark.parametrize("slash", ["", "/"])
def test_keys_of_tritons_python_backend_are_refused(registry, slash):
    with pytest.raises(InvalidRequest, match="triton_python_backend_shm_region_"):
        registry.register("r", f"{slash}triton_python_backend_shm_region_1", 0, 8)


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_a_region_needs_a_name_of_reasonable_length(registry, segment, name):
    with pytest.raises(InvalidRequest, match="name"):
        registry.register(name, segment.key, 0, 8)


def test_a_missing_segment_cannot_be_opened(registry):
    with pytest.raises(InvalidRequest, match="Unable to open shared memory region: '/edge_test_none'") as caught:
        registry.register("r", "/edge_test_none", 0, 8)
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_links_pipes_and_folders_are_not_mapped(registry, segment, tmp_path):
    target = tmp_path / "secret"
    target.write_bytes(bytes(100))
    link, pipe, folder = (segment.path.with_name(segment.key + end) for end in ("_link", "_pipe", "_folder"))
    link.symlink_to(target)
    os.mkfifo(pipe)
    folder.mkdir()
    try:
        for path in (link, pipe, folder):
            with pytest.raises(InvalidRequest, match="Unable to open shared memory region"):
                registry.register("r", path.name, 0, 8)
    finally:
        link.unlink()
        pipe.unlink()
        folder.rmdir()


def test_a_server_that_does_not_allow_it_refuses_all_but_status(segment):
    registry = SharedMemoryRegistry(is_allowed=False)
    for refused in (
        lambda: registry.register("r", segment.key, 0, 8),
        registry.unregister,
        lambda: registry.unregister("r"),
        lambda: registry.pin("r", 0, 8),
    ):
        with pytest.raises(Unsupported, match="--allow-client-shm"):
            refused()
    assert registry.status() == []
    with pytest.raises(NotFound):
        registry.status("r")
    registry.close()


def test_regions_leave_half_of_the_file_descriptors_free(registry, segment, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (6, 6))
    for name in "abc":
        registry.register(name, segment.key, 0, 8)
    with pytest.raises(Throttled, match="3 shared memory regions"):
        registry.register("d", segment.key, 0, 8)
    registry.unregister("a")
    registry.register("d", segment.key, 0, 8)


def test_unlimited_descriptors_are_no_limit_of_regions(registry, segment, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    registry.register("a", segment.key, 0, 8)


def test_threads_that_register_pin_and_unregister_at_once_leave_nothing_behind(registry, segment):
    failures = []

    def churn():
        for _ in range(150):
            with contextlib.suppress(AlreadyExists):
                registry.register("r", segment.key, PAGE + 7, PAGE)
            registry.unregister("r")

    def use(writable):
        for _ in range(600):
            try:
                pin = registry.pin("r", 9, 64, writable=writable)
            except NotFound:
                continue
            array = np.frombuffer(pin.view, np.uint8)
            if array[0] != 16:
                failures.append(array.tolist())
            del array
            pin.release()

    def use_again():
        pieces = None
        for _ in range(600):
            holds = None if pieces is None else pieces.pin()
            if holds is None:
                with contextlib.suppress(NotFound):
                    pieces = pieces_of(registry, size=64)
                continue
            (given,) = pieces.inputs
            if given.memory[given.start] != 7:
                failures.append(given.start)
            for hold in holds:
                hold.release()

    def guarded(work, *args):
        try:
            work(*args)
        except Exception as error:
            failures.append(error)
            raise

    works = [(churn,), (churn,), (use, False), (use, True), (use_again,), (use_again,)]
    threads = [threading.Thread(target=guarded, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    registry.unregister()
    gc.collect()
    assert not segment.is_mapped()
    assert not segment.is_open()


def test_many_rounds_leave_the_number_of_maps_and_descriptors_as_it_was(registry, segment):
    def count():
        return len(os.listdir("/proc/self/fd")), segment.is_mapped()

    before = count()
    for _ in range(1000):
        registry.register("r", segment.key, 5, PAGE)
        registry.pin("r", 0, 8).release()
        registry.unregister("r")
    files, is_mapped = count()
    assert files <= before[0]  # others may be closed meanwhile, as objects of other tests are freed
    assert is_mapped == before[1]
