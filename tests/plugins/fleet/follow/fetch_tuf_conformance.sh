#!/bin/sh
# Make an environment for TUF's conformance suite, from GitHub and PyPI:
#
#     eval "$(tests/e2e/fetch_faketime.sh DEST1)" && eval "$(tests/plugins/fleet/follow/fetch_tuf_conformance.sh DEST2)" &&
#         python -m pytest -m '' tests/plugins/fleet/follow/test_tuf_conformance.py
#
# A second argument is another source for pip, such as the folder of a clone. It needs Python 3.11. A second call with the
# same DEST installs nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || [ $# -eq 2 ] || { echo "usage: $0 DEST [SOURCE]" >&2; exit 2; }
# Version 2.4.0 and the next tests.
commit=eec841c186f81f2d9d8d30460c7e7deefa615f9e
source=${2:-https://github.com/theupdateframework/tuf-conformance/archive/$commit.tar.gz}
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    python3 -m venv "$dest/env" >&2
    "$dest/env/bin/pip" install -q "$source" >&2
    touch "$dest/complete"
fi
printf "export EDGE_TEST_TUF_CONFORMANCE='%s'\n" "$dest/env/bin/python"
