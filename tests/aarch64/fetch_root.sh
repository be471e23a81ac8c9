#!/bin/sh
# Make the files of a Debian 12 machine for aarch64 in a folder, on Debian, as root and with mmdebstrap:
#
#     eval "$(tests/aarch64/fetch_root.sh DEST)" && python -m pytest -m 'soak or long' tests/aarch64
#
# It holds Python 3.11, the wheels for aarch64 of the extras `test` and `zenoh`, and what is in these wheels. This
# machine unpacks everything: nothing of the other machine runs, which would take minutes. So no package is configured,
# and what a configuration would have made stands below. A second call with the same DEST fetches nothing. Prints an
# export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)/root
source=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
export PIP_ROOT_USER_ACTION=ignore

if [ ! -e "$root/complete" ]; then
    [ "$(id -u)" = 0 ] || { echo "$0: needs root, to make the files of another machine" >&2; exit 1; }
    rm -rf "$root"
    mmdebstrap --quiet --architectures=arm64 --variant=extract \
        --include=bash,coreutils,dash,diffutils,dpkg,findutils,grep,libc-bin,libstdc++6,passwd,python3-venv,sed,util-linux \
        --include=systemd-standalone-sysusers,systemd-standalone-tmpfiles \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$root" >&2
    mkdir -p "$root/proc" "$root/sys" "$root/dev/shm" "$root/project" "$root/root" "$root/wheels" "$root/empty"
    echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
    echo '127.0.0.1 localhost' >"$root/etc/hosts"

    # qemu shows this machine's /proc/cpuinfo, in which ONNX Runtime finds no Arm processor, and then crashes. This is
    # what the kernel prints on a Cortex-A76, the nearest that qemu has to the Cortex-A78AE of a Jetson Orin.
    for processor in $(seq 0 $(($(nproc --all) - 1))); do
        printf 'processor\t: %d\nBogoMIPS\t: 100.00\n' "$processor"
        printf 'Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp\n'
        printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: 0xd0b\nCPU revision\t: 1\n\n'
    done >"$root/cpuinfo"

    platforms='--platform manylinux2014_aarch64 --platform any'
    for glibc in 2_36 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do
        platforms="$platforms --platform manylinux_${glibc}_aarch64"
    done
    wheels="--only-binary=:all: --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none $platforms"
    packages=$("$python" "$source/systemd/list_requirements.py" "$source" "$root/empty" 3.11 aarch64 test zenoh | tr -d ' ')
    # shellcheck disable=SC2086
    "$python" -m pip download --quiet --dest "$root/wheels" $wheels $packages pip 'setuptools>=77' >&2
    # Where distutils of Debian's Python looks for what is not a package of Debian's.
    modules=$root/usr/local/lib/python3.11/dist-packages
    # shellcheck disable=SC2086
    "$python" -m pip install --quiet --no-compile --no-index --no-deps --target "$modules" $wheels \
        "$root"/wheels/*.whl >&2
    # Compiled modules are the same on all machines: of use where this Python is 3.11 too. Some files are for others.
    "$python" -m compileall -q -j 0 -s "$root" -p / "$root/usr/lib/python3.11" "$modules" >/dev/null 2>&1 || true
    touch "$root/complete"
fi
printf "export EDGE_TEST_AARCH64_ROOT='%s'\n" "$root"
