#!/bin/sh
# Fetch a Redis server into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/serving/fetch_redis.sh DEST)" && python -m pytest -m full tests/serving/cache tests/e2e/test_response_cache.py
#
# The libraries that it needs and a bare system lacks come with it. A second call with the same DEST fetches nothing.
# Prints two export lines for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
packages="redis-server redis-tools libatomic1 libjemalloc2 liblzf1"

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

server="$dest/usr/bin/redis-server"
libraries=$(find "$dest/usr/lib" -name '*.so.*' -exec dirname {} + | sort -u | paste -s -d:)
LD_LIBRARY_PATH="$libraries" "$server" --version >&2 || { echo "$0: the packages hold no Redis that runs" >&2; exit 1; }
printf "export EDGE_TEST_REDIS_SERVER='%s'\n" "$server"
printf "export EDGE_TEST_REDIS_LIBRARIES='%s'\n" "$libraries"
