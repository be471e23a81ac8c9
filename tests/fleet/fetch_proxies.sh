#!/bin/sh
# Fetch nginx and Caddy into a folder, on Debian or Ubuntu, without root and without starting them:
#
#     eval "$(tests/fleet/fetch_proxies.sh DEST)" && python -m pytest -m full tests/e2e/test_proxies.py
#
# A second call with the same DEST fetches nothing. Prints export lines for the shell. Where a program is installed already,
# that one is named. tests/fleet/fetch_haproxy.sh fetches HAProxy.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

for name in nginx caddy; do
    case $name in nginx) version=-v ;; *) version=version ;; esac
    variable=EDGE_TEST_$(echo "$name" | tr '[:lower:]' '[:upper:]')
    if program=$(command -v "$name"); then
        printf "export %s='%s'\n" "$variable" "$program"
        continue
    fi
    if [ ! -e "$dest/$name.complete" ]; then
        (
            cd "$dest"
            rm -f "$name"_*.deb  # of an interrupted call
            # A fresh machine has no package lists yet.
            [ -n "$(apt-cache show "$name" 2>/dev/null)" ] || apt-get update -q >&2
            apt-get download -q "$name" >&2
            dpkg -x "$name"_*.deb .
            rm "$name"_*.deb
            touch "$name.complete"
        )
    fi
    program=$(find "$dest/usr/bin" "$dest/usr/sbin" -name "$name" -type f 2>/dev/null | head -n 1)
    "$program" "$version" >&2 || { echo "$0: the package holds no $name that runs" >&2; exit 1; }
    printf "export %s='%s'\n" "$variable" "$program"
done
