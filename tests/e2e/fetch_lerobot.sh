#!/bin/sh
# Make an environment for LeRobot's client of robot policies and the bridge for it, from PyPI:
#
#     eval "$(tests/e2e/fetch_lerobot.sh DEST)" && python -m pytest -m long tests/e2e/test_lerobot_client.py
#
# It takes 8 GB, most of it for torch, and needs Python 3.10 to 3.13. A second call with the same DEST installs nothing.
# Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    python3 -m venv "$dest/env" >&2
    "$dest/env/bin/pip" install -q --no-compile 'lerobot[async]==0.4.4' websockets msgpack >&2
    touch "$dest/complete"
fi
printf "export EDGE_TEST_LEROBOT='%s'\n" "$dest/env/bin/python"
