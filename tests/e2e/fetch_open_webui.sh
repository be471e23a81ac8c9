#!/bin/sh
# Make an environment for Open WebUI, a web page for chats, from PyPI:
#
#     eval "$(tests/e2e/fetch_open_webui.sh DEST)" && python -m pytest -m long tests/e2e/language_clients/test_open_webui.py
#
# It takes 7 GB, most of it for torch, and needs Python 3.11 or 3.12. A second call with the same DEST installs nothing.
# Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    python3 -m venv "$dest/env" >&2
    "$dest/env/bin/pip" install -q --no-compile open-webui==0.12.4 >&2
    touch "$dest/complete"
fi
printf "export EDGE_TEST_OPEN_WEBUI='%s'\n" "$dest/env/bin/open-webui"
