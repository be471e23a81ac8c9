"""What `edge-server publish` leaves when it cannot finish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_server.errors import ServingFault
from tests.plugins.fleet.conftest import PAGE_BYTES, Publication, filled

pytest.importorskip("tuf")
pytestmark = pytest.mark.full


def test_a_full_disk_leaves_the_repository_as_it_was(disk: Path, add_model: Callable[..., None]) -> None:
    publication = Publication(disk)
    publication.release(0.5)
    add_model(publication.models / "m", 0.25, filler=40 * PAGE_BYTES)
    before = {path: path.read_bytes() for path in (publication.site / "metadata").iterdir()}
    for pages in (0, 1, 10, 42):
        with filled(disk, pages * PAGE_BYTES), pytest.raises((ServingFault, OSError), match="No space left on device"):
            publication.publish()
        assert not list(publication.site.rglob("*.part"))
    assert {path: path.read_bytes() for path in before} == before
    publication.publish()
    assert (publication.site / "metadata" / "2.targets.json").exists()
