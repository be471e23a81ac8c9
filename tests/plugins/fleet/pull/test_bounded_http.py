"""Downloads from servers that send too slowly, or too much, over real sockets."""

from __future__ import annotations

import contextlib
import hashlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_server.plugins.fleet.follow.site_files import SiteFiles, SiteUnavailable
from edge_server.plugins.fleet.pull.oci_registry import OciBlob, OciRegistry, parse_reference
from edge_server.plugins.fleet.pull.resumable_download import DownloadClient, Interrupted

TIMEOUT_S = 0.2
CONTENT = bytes(range(250)) * 8
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(CONTENT)


@contextlib.contextmanager
def serving(answer: Callable[[bytes], Iterator[bytes]], pause_s: float = 0.01) -> Iterator[str]:
    """Answer each request with the parts that `answer` gives for it, with pauses between them."""
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                received = self.request.recv(65536)
                if not received:
                    return
                request += received
            with contextlib.suppress(OSError):  # the client has hung up
                for part in answer(request):
                    self.request.sendall(part)
                    if ended.wait(pause_s):
                        return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()
            thread.join()


def in_parts(whole: bytes, size: int = 1) -> Iterator[bytes]:
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


def trickle(after: int) -> Callable[[bytes], Iterator[bytes]]:
    """Return answers of which the first `after` bytes come at once, and then one every hundredth of a second."""
    return lambda request: iter([(HEAD + CONTENT)[:after], *in_parts((HEAD + CONTENT)[after:])])


@pytest.mark.parametrize("after", [0, 20, len(HEAD) + 100])
def test_a_file_that_trickles_is_given_up_and_what_came_is_kept(after: int, tmp_path: Path) -> None:
    with serving(trickle(after)) as url, pytest.raises(Interrupted, match="it sends less than 500 bytes/s"):
        DownloadClient(url, {}, None, TIMEOUT_S).download(f"{url}/model.onnx", SHA256, tmp_path, len(CONTENT))
    kept = (tmp_path / SHA256).read_bytes() if (tmp_path / SHA256).exists() else b""
    assert kept == CONTENT[: len(kept)]
    assert bool(kept) == (after > len(HEAD))


@pytest.mark.parametrize("after", [0, len(HEAD) + 10])
def test_a_manifest_and_a_blob_that_trickle_are_given_up(after: int, tmp_path: Path) -> None:
    with serving(trickle(after)) as url:
        registry = OciRegistry(parse_reference(f"oci://{url}/detector"), {}, None, TIMEOUT_S, is_command=False)
        blob = OciBlob("text/plain", SHA256, len(CONTENT), {})
        for read in (registry.read_digest, registry.read_manifest, lambda: registry.download_blob(blob, tmp_path)):
            with pytest.raises(Interrupted, match="it sends less than 500 bytes/s"):
                read()


@pytest.mark.parametrize("after", [0, len(HEAD) + 100])
def test_a_signed_repository_that_trickles_is_given_up(after: int, tmp_path: Path) -> None:
    with serving(trickle(after)) as url:
        site = SiteFiles(url, 0, TIMEOUT_S)
        with pytest.raises(SiteUnavailable, match="it sends less than 500 bytes/s"):
            list(site.read("metadata/timestamp.json"))
        with pytest.raises(SiteUnavailable, match="it sends less than 500 bytes/s"):
            site.download("targets/m/1.json", tmp_path / "part", len(CONTENT))


def test_a_slow_line_is_fast_enough(tmp_path: Path) -> None:
    # 20 parts, each of which gives 0.2 s, and together more than the timeout.
    with serving(lambda request: iter([HEAD, *in_parts(CONTENT, 100)]), pause_s=0.02) as url:
        found = DownloadClient(url, {}, None, TIMEOUT_S).download(f"{url}/model.onnx", SHA256, tmp_path, len(CONTENT))
        assert found.read_bytes() == CONTENT
        assert b"".join(list(SiteFiles(url, 0, TIMEOUT_S).read("targets/m/1.json"))[1:]) == CONTENT


def test_a_redirect_with_an_endless_body_is_followed_at_once(tmp_path: Path) -> None:
    def answer(request: bytes) -> Iterator[bytes]:
        if b"/there" in request:
            yield HEAD + CONTENT
            return
        yield b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /there\r\n\r\n"
        while True:
            yield bytes(1 << 20)

    with serving(answer, pause_s=0.0) as url:
        found = DownloadClient(url, {}, None, 60.0, is_command=False).download(f"{url}/model.onnx", SHA256, tmp_path)
        assert found.read_bytes() == CONTENT
        assert b"".join(list(SiteFiles(url, 0, 60.0).read("targets/m/1.json"))[1:]) == CONTENT
