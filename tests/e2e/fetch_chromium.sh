#!/bin/sh
# Fetch Chromium and its driver into a folder, on Debian, without root, and the accessibility checker axe-core:
#
#     eval "$(tests/e2e/fetch_chromium.sh DEST)" && python -m pytest -m full tests/e2e/test_dashboard.py
#
# The libraries and the font that they need and a bare system lacks come with them. A second call with the same DEST
# fetches nothing. Prints export lines for the shell. axe-core is left out where npm's registry cannot be reached.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

download() {
    packages=$(apt-get install -s --no-install-recommends chromium chromium-driver fonts-liberation |
        sed -n 's/^Inst \([^ ]*\).*/\1/p')
    # shellcheck disable=SC2086
    [ -z "$packages" ] || apt-get download -q $packages >&2
}

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A fresh machine has no package lists yet.
        download || { apt-get update >&2 && download; }
        for package in *.deb; do
            [ -e "$package" ] || continue
            dpkg -x "$package" .
            rm "$package"
        done
        touch complete
    )
fi
if [ ! -e "$dest/axe/package/axe.min.js" ] && command -v npm >/dev/null; then
    mkdir -p "$dest/axe"
    (cd "$dest/axe" && npm pack --silent axe-core@4 >&2 && tar -xzf axe-core-*.tgz) || true
fi

# What the system has already was not fetched.
root=""
[ ! -e "$dest/usr/lib/chromium/chromium" ] || root=$dest
libraries=$(find "$dest" -name '*.so*' -exec dirname {} + | sort -u | paste -s -d:)
LD_LIBRARY_PATH="$libraries" "$root/usr/lib/chromium/chromium" --version >&2 ||
    { echo "$0: the packages hold no Chromium that runs" >&2; exit 1; }
printf "export EDGE_TEST_CHROMIUM='%s'\n" "$root/usr/lib/chromium/chromium"
printf "export EDGE_TEST_CHROMEDRIVER='%s'\n" "$root/usr/bin/chromedriver"
printf "export EDGE_TEST_CHROMIUM_LIBRARIES='%s'\n" "$libraries"
printf "export EDGE_TEST_CHROMIUM_FONTS='%s'\n" "$dest/usr/share/fonts"
[ ! -e "$dest/axe/package/axe.min.js" ] || printf "export EDGE_TEST_AXE='%s'\n" "$dest/axe/package/axe.min.js"
