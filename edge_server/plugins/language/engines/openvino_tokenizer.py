"""Loader of a model's tokenizer with OpenVINO GenAI, without a limit on the length of a text.

The tokenizer that the library makes from a GGUF file drops all but the last 8,192 tokens of a text, and no option of
the library changes that. So it is written as OpenVINO IR (https://docs.openvino.ai, "OpenVINO IR format"), its limit is
raised there, and it is opened from these files. Checked against openvino-genai 2026.4.
"""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from edge_server.plugins.language.engines.locked_folder import locked_folder

_XML, _BIN = "openvino_tokenizer.xml", "openvino_tokenizer.bin"
_UNLIMITED = struct.pack("<i", (1 << 31) - 1)


def open_tokenizer(library: Any, path: Path) -> Any:
    """Return the library's Tokenizer of a GGUF file or of the folder of an export. Nothing is written beside them.

    Raises whatever the library raises for files that it cannot read.
    """
    with locked_folder("tokenizer") as folder:
        if path.is_dir():
            for file in path.iterdir():
                (folder / file.name).symlink_to(file.absolute())
        else:
            link = folder / "model.gguf"
            link.symlink_to(path.absolute())
            library.Tokenizer(link, enable_save_ov_model=True)
            link.unlink()
        _raise_limit(folder)
        return library.Tokenizer(folder)


def _raise_limit(folder: Path) -> None:
    """Replace the constants that cut a text, if there are any.

    Such a tokenizer takes the smaller one of the tokens' number and a constant. Exports of today have a layer
    `Truncate` instead, which the library switches off by itself.
    """
    tree = ElementTree.parse(folder / _XML)
    layers = {layer.get("id"): layer for layer in tree.iter("layer")}
    weights = (folder / _BIN).read_bytes()
    has_limit = False
    for edge in tree.iter("edge"):
        source, target = layers[edge.get("from-layer")], layers[edge.get("to-layer")]
        data = source.find("data")
        if (
            target.get("type") != "Minimum"
            or data is None
            or (data.get("element_type"), data.get("size")) != ("i32", "4")
        ):
            continue
        # Not in place: equal constants share their bytes.
        data.set("offset", str(len(weights)))
        weights += _UNLIMITED
        has_limit = True
    if has_limit:
        for name in (_XML, _BIN):
            (folder / name).unlink()
        (folder / _BIN).write_bytes(weights)
        tree.write(folder / _XML, encoding="utf-8")
