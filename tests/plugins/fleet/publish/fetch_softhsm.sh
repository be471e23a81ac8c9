#!/bin/sh
# Fetch SoftHSM, PKCS#11 tokens in files, into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/plugins/fleet/publish/fetch_softhsm.sh DEST)" && python -m pytest -m '' tests/plugins/fleet/publish
#
# The tests also need python-pkcs11 of the extra test-all. A second call with the same DEST fetches nothing. Prints an export
# line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A fresh machine has no package lists yet.
        apt-get download -q softhsm2 libsofthsm2 >&2 ||
            { apt-get update -q >&2 && apt-get download -q softhsm2 libsofthsm2 >&2; }
        for package in *.deb; do
            dpkg -x "$package" .
            rm "$package"
        done
        touch complete
    )
fi

"$dest/usr/bin/softhsm2-util" --version >&2 || { echo "$0: softhsm2-util does not start" >&2; exit 1; }
printf "export EDGE_TEST_SOFTHSM='%s'\n" "$dest"
