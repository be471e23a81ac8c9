#!/usr/bin/env bash
# Build a Debian package of edge_server that installs without a network: it carries every Python package that it needs,
# and wants python3.X and libc of the box, nothing else. It is for one version of Python and one architecture.
#
#     systemd/build_deb.sh OUT_DIR                             for this machine's /usr/bin/python3
#     systemd/build_deb.sh --python 3.10 --arch arm64 OUT_DIR  for JetPack 6, from any machine (3.12: JetPack 7)
#     systemd/build_deb.sh --from PYTHON OUT_DIR               without a network: with what that Python has installed
#     systemd/build_deb.sh --extras cpu,signatures ...         extras of pyproject.toml; the default is cpu
#     systemd/build_deb.sh --wheels DIR ...                    from a folder of wheels rather than from PyPI
#
# Prints the path of the package.
set -euo pipefail
# The service's user reads all of it, whatever the umask is here.
umask 022

describe() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; }
usage() {
  describe >&2
  exit 64
}
case ${1-} in -h | --help)
  describe
  exit 0
  ;;
esac

python='' arch='' from='' extras=cpu wheels='' level=6
while [ $# -gt 1 ]; do
  case $1 in
    --python) python=$2 ;;
    --arch) arch=$2 ;;
    --from) from=$2 ;;
    --extras) extras=$2 ;;
    --wheels) wheels=$2 ;;
    --level) level=$2 ;;
    *) usage ;;
  esac
  shift 2
done
if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then usage; fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
source=$(dirname "$here")

short() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
if [ -n "$from" ]; then python=$(short "$from"); fi
python=${python:-$(short /usr/bin/python3)}
arch=${arch:-$(dpkg --print-architecture)}
case $arch in
  amd64) machine=x86_64 ;;
  arm64) machine=aarch64 ;;
  *) echo "$0: no runtimes have wheels for $arch" >&2; exit 64 ;;
esac
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$source/edge_server/version.py")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
home=$root/opt/edge_server
mkdir -p "$home/lib" "$home/bin"

# -- what is carried --------------------------------------------------------------------------------------------------
if [ -n "$from" ]; then
  "$from" "$here/collect_dependencies.py" "$source" "$home/lib" ${extras:+${extras//,/ }}
else
  host=${PIP_PYTHON:-python3}
  platforms=()
  for glibc in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_$machine"); done
  platforms+=(--platform "manylinux2014_$machine" --platform any)
  index=()
  [ -z "$wheels" ] || index=(--no-index --find-links "$wheels")
  # Again with what pip missed, because it holds on that machine and not on this one, until nothing is missing.
  lines=()
  for round in 1 2 3 4 5; do
    missing=$("$host" "$here/list_requirements.py" "$source" "$home/lib" "$python" "$machine" ${extras:+${extras//,/ }})
    [ -n "$missing" ] || break
    mapfile -t more <<<"$missing"
    lines+=("${more[@]}")
    rm -rf "${home:?}/lib"
    mkdir "$home/lib"
    "$host" -m pip install --quiet --no-compile --only-binary=:all: --target "$home/lib" \
      --python-version "$python" --implementation cp --abi "cp${python/./}" --abi abi3 --abi none \
      "${platforms[@]}" "${index[@]}" "${lines[@]}" >&2
  done
  if [ -n "$missing" ]; then
    echo "$0: after $round rounds there is still missing: $missing" >&2
    exit 1
  fi
  rm -rf "$home/lib/bin"
fi
# -L: the bundled models and the documents are links to other folders. The page shows the documents of docs/ and
# docs/reference/ alone. Of the models only the bundled ones: a clone's model_repository may have the user's own beside.
(cd "$source" && find -L edge_server -type f ! -path '*/__pycache__/*' ! -path '*/.mypy_cache/*' \
  ! \( -path '*/dashboard/documents/*' ! -regex '.*/documents/\(reference/\)?[^/]*\.md' \) \
  ! \( -path 'edge_server/demo_models/*' ! -path 'edge_server/demo_models/efficientnet_lite0/*' \
    ! -path 'edge_server/demo_models/face_detection_yunet/*' \) -print0) |
  (cd "$source" && tar --null -T - -cf -) | tar -C "$home/lib" -xf -

# -- the program ------------------------------------------------------------------------------------------------------
cat >"$home/bin/edge-server" <<LAUNCHER
#!/bin/sh
# Runs edge_server from the folder beside this one, wherever that was unpacked.
here=\$(dirname "\$(readlink -f "\$0")")
PYTHONPATH="\$here/../lib\${PYTHONPATH:+:\$PYTHONPATH}" exec "\${EDGE_PYTHON:-/usr/bin/python$python}" -m edge_server "\$@"
LAUNCHER
chmod 755 "$home/bin/edge-server"
# A clone that was made with a strict umask has files that its owner alone reads.
chmod -R u=rwX,go=rX "$home"
mkdir -p "$root/usr/bin"
ln -s /opt/edge_server/bin/edge-server "$root/usr/bin/edge-server"

# -- the service ------------------------------------------------------------------------------------------------------
install -D -m 644 "$here/edge-server.service" "$root/lib/systemd/system/edge-server.service"
install -D -m 644 "$here/sysusers.conf" "$root/usr/lib/sysusers.d/edge-server.conf"
install -D -m 644 "$here/tmpfiles.conf" "$root/usr/lib/tmpfiles.d/edge-server.conf"
install -D -m 640 "$here/config.toml" "$root/etc/edge_server/config.toml"
install -d "$root/usr/share/edge-server" "$root/usr/share/doc/edge-server"
cp "$here"/edge-server.service.d/* "$root/usr/share/edge-server/"
chmod 644 "$root"/usr/share/edge-server/*
install -m 644 "$here/README.md" "$root/usr/share/doc/edge-server/README.md"
install -m 644 "$source/LICENSE" "$root/usr/share/doc/edge-server/copyright"

# -- man pages and shell completion, made by docs/reference/generate.py -----------------------------------------------
install -D -m 644 "$here/shell/completion/edge-server.bash" "$root/usr/share/bash-completion/completions/edge-server"
install -D -m 644 "$here/shell/completion/_edge-server" "$root/usr/share/zsh/vendor-completions/_edge-server"
install -D -m 644 "$here/shell/completion/edge-server.fish" "$root/usr/share/fish/vendor_completions.d/edge-server.fish"
install -d "$root/usr/share/man/man1"
for page in "$here"/shell/man/*.1; do
  gzip -9nc "$page" >"$root/usr/share/man/man1/${page##*/}.gz"
done
chmod 644 "$root"/usr/share/man/man1/*

control=$root/DEBIAN
mkdir -p "$control"
cat >"$control/control" <<CONTROL
Package: edge-server
Version: $version
Architecture: $arch
Maintainer: edge_server <edge-server@localhost>
Installed-Size: $(du -sk "$root" | cut -f1)
Depends: python$python, libc6 (>= 2.28)
Recommends: systemd
Section: net
Priority: optional
Description: small inference server for robots and edge boxes
 Serves models over Triton's HTTP and gRPC protocols, and camera frames over a stream of their own. Carries every Python
 package that it needs; installs without a network.
CONTROL
echo /etc/edge_server/config.toml >"$control/conffiles"
install -m 755 "$here/deb/postinst" "$here/deb/prerm" "$here/deb/postrm" "$control/"

package=$out/edge-server_${version}_py${python}_$arch.deb
dpkg-deb --root-owner-group -Zgzip "-z$level" --build "$root" "$package" >&2
echo "$package"
