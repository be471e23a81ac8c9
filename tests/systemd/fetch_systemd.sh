#!/bin/sh
# Fetch systemd-analyze and the libraries it needs into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/systemd/fetch_systemd.sh DEST)" && python -m pytest -m full tests/systemd/test_unit_files.py
#
# Prints an export line for the shell. Where systemd is installed already, that one is named.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
if program=$(command -v systemd-analyze); then
    printf "export EDGE_TEST_SYSTEMD_ANALYZE='%s'\n" "$program"
    exit 0
fi
mkdir -p "$1"
dest=$(cd "$1" && pwd)
(
    cd "$dest"
    packages='systemd libsystemd-shared libsystemd0 libseccomp2 libkmod2 libmount1 libblkid1 libcryptsetup12'
    # Releases differ in which of these there are; a fresh machine has no package lists yet.
    apt-get --version >/dev/null
    [ -n "$(apt-cache show systemd 2>/dev/null)" ] || apt-get update >&2
    for package in $packages; do
        apt-get download "$package" >&2 || echo "$0: there is no package $package here" >&2
    done
    for file in *.deb; do dpkg -x "$file" .; done
)
libraries=$(find "$dest" -name '*.so*' -exec dirname {} \; | sort -u | paste -s -d : -)
cat >"$dest/systemd-analyze" <<WRAPPER
#!/bin/sh
# The units of the system stand behind those that are looked at; a path that ends in a colon adds the built-in ones.
SYSTEMD_UNIT_PATH="\${SYSTEMD_UNIT_PATH:-}$dest/lib/systemd/system:$dest/usr/lib/systemd/system:" LD_LIBRARY_PATH="$libraries" exec "$dest/usr/bin/systemd-analyze" "\$@"
WRAPPER
chmod +x "$dest/systemd-analyze"
"$dest/systemd-analyze" --version >&2
printf "export EDGE_TEST_SYSTEMD_ANALYZE='%s'\n" "$dest/systemd-analyze"
