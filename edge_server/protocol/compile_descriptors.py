"""Compiler of the .proto files to `descriptors.binpb`: `python -m edge_server.protocol.compile_descriptors`.

Needs grpcio-tools, at development time only. The result is one serialized FileDescriptorSet without source locations,
with dependencies before their users. It is committed, so that users need no compiler.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
DESCRIPTORS = FOLDER / "descriptors.binpb"


def compile_protos() -> bytes:
    """Return the serialized FileDescriptorSet of all .proto files in this folder.

    Raises ImportError without grpcio-tools, and RuntimeError when protoc refuses a file; protoc has printed the reason.
    """
    from grpc_tools import protoc

    sources = sorted(path.name for path in FOLDER.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors.binpb"
        status = protoc.main(
            ["protoc", f"--proto_path={FOLDER}", "--include_imports", f"--descriptor_set_out={target}", *sources]
        )
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status}")
        return target.read_bytes()


def main() -> int:
    """Write `descriptors.binpb` and return an exit code."""
    try:
        compiled = compile_protos()
    except ImportError:
        print("compiling needs grpcio-tools: pip install grpcio-tools", file=sys.stderr)
        return 1
    DESCRIPTORS.write_bytes(compiled)
    print(f"{DESCRIPTORS.name}: {len(compiled)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
