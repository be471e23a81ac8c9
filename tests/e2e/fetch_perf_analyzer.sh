#!/bin/sh
# Fetch perf_analyzer and the libraries it needs into a folder, on Debian or Ubuntu, x86-64, without root:
#
#     eval "$(tests/e2e/fetch_perf_analyzer.sh DEST)" && python -m pytest -m full tests/e2e/test_perf_analyzer.py
#
# The program is in the manylinux1 wheel of tritonclient 2.47.0, libcudart.so.12 in the wheel of nvidia-cuda-runtime-cu12
# and libb64.so.0d in the package libb64-0d. Prints two export lines for the shell. PYTHON names the interpreter to use.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
python=${PYTHON:-python3}

# wheel NAME==VERSION PLATFORM: download one wheel and unpack it into $dest.
wheel() {
    wheels=$(mktemp -d "$dest/wheel.XXXXXX")
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.10 --platform "$2" \
        --dest "$wheels" "$1" >&2
    "$python" -m zipfile -e "$wheels"/*.whl "$dest"
    rm -r "$wheels"
}

wheel tritonclient==2.47.0 manylinux1_x86_64
wheel nvidia-cuda-runtime-cu12 manylinux2014_x86_64
(
    cd "$dest"
    # A fresh machine has no package lists yet.
    apt-get download libb64-0d >&2 || { apt-get update >&2 && apt-get download libb64-0d >&2; }
    dpkg -x libb64-0d_*.deb .
)

program=$(find "$dest" -path '*/bin/perf_analyzer' -type f | head -n 1)
[ -n "$program" ] || { echo "$0: the wheel holds no perf_analyzer" >&2; exit 1; }
chmod +x "$program"
libraries=$(find "$dest" \( -name 'libb64.so*' -o -name 'libcudart.so*' \) -exec dirname {} \; | sort -u | paste -s -d : -)
printf "export EDGE_TEST_PERF_ANALYZER='%s'\n" "$program"
printf "export EDGE_TEST_PERF_ANALYZER_LIBS='%s'\n" "$libraries"
