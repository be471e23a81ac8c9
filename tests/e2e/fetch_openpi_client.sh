#!/bin/sh
# Make an environment for openpi's client of robot policies, from PyPI:
#
#     eval "$(tests/e2e/fetch_openpi_client.sh DEST)" && python -m pytest -m '' tests/e2e/test_openpi_client.py
#
# It wants numpy 1, so it cannot be in the tests' own environment. A second call with the same DEST installs nothing. Prints
# an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    python3 -m venv "$dest/env" >&2
    # typing_extensions: the client imports it, and does not say so.
    "$dest/env/bin/pip" install -q --no-compile openpi-client==0.1.2 typing_extensions >&2
    touch "$dest/complete"
fi
printf "export EDGE_TEST_OPENPI_CLIENT='%s'\n" "$dest/env/bin/python"
