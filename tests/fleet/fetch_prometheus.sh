#!/bin/sh
# Fetch Prometheus and promtool into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/fleet/fetch_prometheus.sh DEST)" && python -m pytest -m '' tests/fleet/test_monitoring.py
#
# They need no libraries. A second call with the same DEST fetches nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A fresh machine has no package lists yet.
        apt-get download -q prometheus >&2 || { apt-get update -q >&2 && apt-get download -q prometheus >&2; }
        dpkg -x prometheus_*.deb .
        rm prometheus_*.deb
        touch complete
    )
fi

"$dest/usr/bin/promtool" --version >&2
printf "export EDGE_TEST_PROMETHEUS='%s'\n" "$dest/usr/bin"
