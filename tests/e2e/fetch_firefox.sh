#!/bin/sh
# Fetch Firefox ESR into a folder, on Debian, without root:
#
#     eval "$(tests/e2e/fetch_firefox.sh DEST)" && python -m pytest -m full tests/e2e/test_dashboard_in_firefox.py
#
# The libraries that it needs and a bare system lacks come with it; the font is that of fetch_chromium.sh. A second call
# with the same DEST fetches nothing. Prints export lines for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

download() {
    packages=$(apt-get install -s --no-install-recommends firefox-esr | sed -n 's/^Inst \([^ ]*\).*/\1/p')
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

# What the system has already was not fetched.
root=""
[ ! -e "$dest/usr/lib/firefox-esr/firefox-esr" ] || root=$dest
libraries=$(find "$dest" -name '*.so*' -exec dirname {} + | sort -u | paste -s -d:)
LD_LIBRARY_PATH="$libraries" "$root/usr/lib/firefox-esr/firefox-esr" --version >&2 ||
    { echo "$0: the packages hold no Firefox that runs" >&2; exit 1; }
printf "export EDGE_TEST_FIREFOX='%s'\n" "$root/usr/lib/firefox-esr/firefox-esr"
printf "export EDGE_TEST_FIREFOX_LIBRARIES='%s'\n" "$libraries"
