#!/bin/sh
# Make an environment with the packages whose exports are recognised, from PyPI, for tensors to compare with:
#
#     eval "$(tests/plugins/vision/fetch_exporters.sh DEST)" && python -m pytest -m long tests/plugins/vision
#
# It takes 6 GB, most of it for torch. A second call with the same DEST installs nothing. Prints an export line for the
# shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    python3 -m venv "$dest/env" >&2
    "$dest/env/bin/pip" install -q --no-compile \
        ultralytics transformers torchvision rfdetr paddleocr openvino-model-api >&2
    touch "$dest/complete"
fi
printf "export EDGE_TEST_EXPORTERS='%s'\n" "$dest/env/bin/python"
