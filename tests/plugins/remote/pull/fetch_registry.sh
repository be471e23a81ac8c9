#!/bin/sh
# Fetch docker-registry and skopeo from Debian's packages, and oras from PyPI in an environment of its own, into a
# folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/plugins/remote/pull/fetch_registry.sh DEST)" && python -m pytest -m full tests/plugins/remote/pull
#
# A second call with the same DEST fetches nothing. Prints two export lines for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
packages="docker-registry skopeo"

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
        python3 -m venv oras
        oras/bin/pip install -q 'oras==0.2.43' >&2
        touch complete
    )
fi

"$dest/usr/bin/docker-registry" --version >&2 || { echo "$0: the packages hold no registry that runs" >&2; exit 1; }
printf "export EDGE_TEST_REGISTRY='%s'\n" "$dest/usr/bin"
printf "export EDGE_TEST_ORAS='%s'\n" "$dest/oras/bin/python"
