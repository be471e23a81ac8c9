#!/bin/sh
# Fetch HAProxy into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/fleet/fetch_haproxy.sh DEST)" && python -m pytest -m '' tests/fleet/test_haproxy.py
#
# The libraries that it needs and a bare system lacks come with it. A second call with the same DEST fetches nothing.
# Prints an export line for the shell. Where HAProxy is installed already, that one is named.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
if program=$(command -v haproxy); then
    printf "export EDGE_TEST_HAPROXY='%s'\n" "$program"
    exit 0
fi
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A fresh machine has no package lists yet.
        [ -n "$(apt-cache show haproxy 2>/dev/null)" ] || apt-get update -q >&2
        # Releases differ in which libraries there are. The wrapper below shows whether one is missing.
        apt-get download -q haproxy >&2
        for package in liblua5.3-0 liblua5.4-0 libopentracing-c-wrapper0 libopentracing1 libpcre2-8-0; do
            apt-get download -q "$package" >&2 || echo "$0: there is no package $package here" >&2
        done
        for package in *.deb; do
            dpkg -x "$package" .
            rm "$package"
        done
        touch complete
    )
fi

libraries=$(find "$dest" -name '*.so.*' -exec dirname {} + | sort -u | paste -s -d:)
mkdir -p "$dest/bin"
cat >"$dest/bin/haproxy" <<WRAPPER
#!/bin/sh
LD_LIBRARY_PATH="$libraries" exec "$dest/usr/sbin/haproxy" "\$@"
WRAPPER
chmod +x "$dest/bin/haproxy"
"$dest/bin/haproxy" -v >&2 || { echo "$0: the packages hold no haproxy that runs" >&2; exit 1; }
printf "export EDGE_TEST_HAPROXY='%s'\n" "$dest/bin/haproxy"
