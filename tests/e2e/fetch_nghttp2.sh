#!/bin/sh
# Fetch h2load and nghttp, the programs of nghttp2, into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/e2e/fetch_nghttp2.sh DEST)" && python -m pytest -m full tests/e2e/grpc_wire/test_other_clients.py
#
# The libraries that they need and a bare system lacks come with them. A second call with the same DEST fetches nothing.
# Prints two export lines for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
packages="nghttp2-client libnghttp2-14 libc-ares2 libev4 libjansson4 libjemalloc2 libxml2"

download() {
    # shellcheck disable=SC2086
    apt-get download -q $packages >&2
}

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A fresh machine has no package lists yet.
        download || { apt-get update >&2 && download; }
        for package in *.deb; do
            dpkg -x "$package" .
            rm "$package"
        done
        touch complete
    )
fi

libraries=$(find "$dest/usr/lib" -name '*.so.*' -exec dirname {} + | sort -u | paste -s -d:)
LD_LIBRARY_PATH="$libraries" "$dest/usr/bin/h2load" --version >&2 ||
    { echo "$0: the packages hold no h2load that runs" >&2; exit 1; }
printf "export EDGE_TEST_NGHTTP2='%s'\n" "$dest/usr/bin"
printf "export EDGE_TEST_NGHTTP2_LIBRARIES='%s'\n" "$libraries"
