"""Without Ray."""

from __future__ import annotations

import importlib.util

import pytest

from edge_server.errors import BackendMissing


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_names_how_to_install_it() -> None:
    with pytest.raises(BackendMissing, match=r"pip install '\.\[ray\]'"):
        importlib.import_module("edge_server.ray")
