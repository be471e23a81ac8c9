#!/bin/sh
# Fetch libfaketime into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/e2e/fetch_faketime.sh DEST)" && python -m pytest -m '' tests/e2e/test_wall_clock_jumps.py
#
# A second call with the same DEST fetches nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A fresh machine has no package lists yet.
        apt-get download -q libfaketime >&2 || { apt-get update -q >&2 && apt-get download -q libfaketime >&2; }
        for package in *.deb; do
            dpkg -x "$package" .
            rm "$package"
        done
        touch complete
    )
fi

library=$(find "$dest" -name libfaketimeMT.so.1)
year=$(LD_PRELOAD="$library" FAKETIME='+4000d' date +%Y)
[ "$year" -gt "$(date +%Y)" ] || { echo "$0: the package holds no libfaketime that works" >&2; exit 1; }
printf "export EDGE_TEST_FAKETIME='%s'\n" "$library"
