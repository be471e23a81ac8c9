#!/bin/sh
# Fetch ipycam, a virtual camera with ONVIF, from PyPI into a folder:
#
#     eval "$(tests/plugins/cameras/onvif/fetch_onvif_camera.sh DEST)" && python -m pytest -m full tests/plugins/cameras/onvif
#
# It runs with the OpenCV of the tests. A second call with the same DEST fetches nothing. Prints export lines for the
# shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
[ -d "$dest/ipycam" ] || python3 -m pip install -q --no-deps --target "$dest" ipycam==1.3.0 >&2
printf "export EDGE_TEST_ONVIF_CAMERA='%s'\n" "$dest"
