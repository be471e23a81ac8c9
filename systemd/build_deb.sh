#!/usr/bin/env bash
# Build the Debian packages of edge_server, which install without a network and without pip: the program (edge-server), the
# Python packages that it needs (edge-server-runtimes) and the models of `serve --demo` (edge-server-models). They want
# python3.X and libc of the box, nothing else, and are for one version of Python and one architecture.
#
#     systemd/build_deb.sh OUT_DIR                             for this machine's /usr/bin/python3
#     systemd/build_deb.sh --python 3.10 --arch arm64 OUT_DIR  for JetPack 6, from any machine (3.12: JetPack 7)
#     systemd/build_deb.sh --from PYTHON OUT_DIR               without a network: with what that Python has installed
#     systemd/build_deb.sh --extras cpu,signatures ...         extras of pyproject.toml; the default is cpu
#     systemd/build_deb.sh --wheels DIR ...                    from a folder of wheels rather than from PyPI
#     systemd/build_deb.sh --version VERSION ...               the default is the program's and the time: 0.1.0+20261126130512
#
# Prints the paths of the three packages. Runtimes or models that OUT_DIR holds already with the same contents are not
# built again, so that an update of the program is one small package.
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

python='' arch='' from='' extras=cpu wheels='' level=6 version=''
while [ $# -gt 1 ]; do
  case $1 in
    --python) python=$2 ;;
    --arch) arch=$2 ;;
    --from) from=$2 ;;
    --extras) extras=$2 ;;
    --wheels) wheels=$2 ;;
    --level) level=$2 ;;
    --version) version=$2 ;;
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
now=$(date -u +%Y%m%d%H%M%S)
version=${version:-$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$source/edge_server/version.py")+$now}
# It is also the name of a folder.
case $version in
  [!0-9]* | *[!A-Za-z0-9.+~-]*)
    echo "$0: --version: expected a digit, then letters, digits and . + ~ -, got '$version'" >&2
    exit 64
    ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/program
# What systemd/deb/program-update makes a version of.
home=$root/opt/edge_server/packages/program
library=$work/runtimes/opt/edge_server/packages/runtimes/lib
models=$work/models/opt/edge_server/models
mkdir -p "$home/lib" "$home/bin" "$library" "$models"

# pack ROOT NAME VERSION SUFFIX: build a package of ROOT, with the rest of the control file from the standard input.
pack() {
  mkdir -p "$1/DEBIAN"
  {
    printf 'Package: %s\nVersion: %s\nMaintainer: edge_server <edge-server@localhost>\n' "$2" "$3"
    printf 'Section: net\nPriority: optional\nInstalled-Size: %s\n' "$(du -sk "$1" | cut -f1)"
    cat
  } >"$1/DEBIAN/control"
  # Under its name only when it is complete.
  dpkg-deb --root-owner-group -Zgzip "-z$level" --build "$1" "$out/.$2.part" >&2
  mv "$out/.$2.part" "$out/$2_$3_$4.deb"
}

# version_of ROOT NAME SUFFIX: print the version of the package with the contents of ROOT: that of a package in OUT_DIR, or
# a new one.
version_of() {
  local digest file
  digest=$(cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0r sha256sum | sha256sum | cut -c 1-12)
  for file in "$out/$2_"*"+$digest"_*"$3.deb"; do
    if [ -e "$file" ]; then
      dpkg-deb --field "$file" Version
      return
    fi
  done
  echo "$now+$digest"
}

# -- runtimes ---------------------------------------------------------------------------------------------------------
if [ -n "$from" ]; then
  "$from" "$here/collect_dependencies.py" "$source" "$library" ${extras:+${extras//,/ }}
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
    missing=$("$host" "$here/list_requirements.py" "$source" "$library" "$python" "$machine" ${extras:+${extras//,/ }})
    [ -n "$missing" ] || break
    mapfile -t more <<<"$missing"
    lines+=("${more[@]}")
    rm -rf "$library"
    mkdir "$library"
    "$host" -m pip install --quiet --no-compile --only-binary=:all: --target "$library" \
      --python-version "$python" --implementation cp --abi "cp${python/./}" --abi abi3 --abi none \
      "${platforms[@]}" "${index[@]}" "${lines[@]}" >&2
  done
  if [ -n "$missing" ]; then
    echo "$0: after $round rounds there is still missing: $missing" >&2
    exit 1
  fi
  rm -rf "${library:?}/bin"
fi
# A clone that was made with a strict umask has files that its owner alone reads.
chmod -R u=rwX,go=rX "$library"
suffix=py${python}_$arch
runtimes=$(version_of "$work/runtimes" edge-server-runtimes "$suffix")
if [ ! -e "$out/edge-server-runtimes_${runtimes}_$suffix.deb" ]; then
  pack "$work/runtimes" edge-server-runtimes "$runtimes" "$suffix" <<CONTROL
Architecture: $arch
Depends: python$python, libc6 (>= 2.28)
Description: Python packages of edge-server
 The runtimes (such as ONNX Runtime and OpenVINO) and all other Python packages that edge-server needs.
CONTROL
fi

# -- models: only the bundled ones, as a clone's model_repository may have the user's own beside ------------------------
for model in efficientnet_lite0 face_detection_yunet; do
  [ ! -d "$source/model_repository/$model" ] || cp -RL "$source/model_repository/$model" "$models/"
done
find "$models" -name __pycache__ -prune -exec rm -r {} +
chmod -R u=rwX,go=rX "$models"
bundled=$(version_of "$work/models" edge-server-models all)
if [ ! -e "$out/edge-server-models_${bundled}_all.deb" ]; then
  pack "$work/models" edge-server-models "$bundled" all <<CONTROL
Architecture: all
Description: models of \`edge-server serve --demo\`
CONTROL
fi

# -- the program ------------------------------------------------------------------------------------------------------
# -L: the documents are links to another folder. The page shows those of docs/ and docs/reference/ alone.
(cd "$source" && find -L edge_server -type f ! -path '*/__pycache__/*' ! -path '*/.mypy_cache/*' \
  ! \( -path '*/dashboard/documents/*' ! -regex '.*/documents/\(reference/\)?[^/]*\.md' \) \
  ! -path 'edge_server/demo_models/*' -print0) |
  (cd "$source" && tar --null -T - -cf -) | tar -C "$home/lib" -xf -
ln -s /opt/edge_server/models "$home/lib/edge_server/demo_models"
cat >"$home/bin/edge-server" <<LAUNCHER
#!/bin/sh
# Runs edge_server from the folder beside this one, whichever link led here. EDGE_UPDATE_HOME: where program-update tells
# of updates.
here=\$(dirname "\$(readlink -f "\$0")")
export EDGE_UPDATE_HOME="\${here%/versions/*}"
PYTHONPATH="\$here/../lib\${PYTHONPATH:+:\$PYTHONPATH}" exec "\${EDGE_PYTHON:-/usr/bin/python$python}" "\$here/../lib/edge-server" "\$@"
LAUNCHER
chmod 755 "$home/bin/edge-server"
# Not by python -m, which would import what lies in the current folder.
printf 'from edge_server.cli.main import main\n\nraise SystemExit(main())\n' >"$home/lib/edge-server"
echo "$version" >"$home/version"
chmod -R u=rwX,go=rX "$home"
mkdir -p "$root/usr/bin" "$root/opt/edge_server/bin"
ln -s ../current/bin/edge-server "$root/opt/edge_server/bin/edge-server"
ln -s /opt/edge_server/bin/edge-server "$root/usr/bin/edge-server"

# -- the service ------------------------------------------------------------------------------------------------------
install -D -m 644 "$here/edge-server.service" "$root/lib/systemd/system/edge-server.service"
install -D -m 644 "$here/deb/update.conf" "$root/lib/systemd/system/edge-server.service.d/update.conf"
install -m 644 "$here"/deb/edge-server-*.* "$here"/edge-server-*.service "$root/lib/systemd/system/"
install -D -m 755 "$here/deb/program-update" "$root/usr/lib/edge-server/program-update"
install -D -m 644 "$here/sysusers.conf" "$root/usr/lib/sysusers.d/edge-server.conf"
install -D -m 644 "$here/tmpfiles.conf" "$root/usr/lib/tmpfiles.d/edge-server.conf"
# For Jetsons; other machines' devices have their groups from the system.
[ "$arch" != arm64 ] || install -D -m 644 "$source/jetson/udev.rules" "$root/lib/udev/rules.d/90-edge-server.rules"
install -D -m 640 "$here/config.toml" "$root/etc/edge_server/config.toml"
install -d "$root/usr/share/edge-server" "$root/usr/share/doc/edge-server"
cp "$here"/edge-server.service.d/* "$root/usr/share/edge-server/"
chmod 644 "$root"/usr/share/edge-server/*
install -m 644 "$here/README.md" "$root/usr/share/doc/edge-server/README.md"
install -m 644 "$source/LICENSE" "$root/usr/share/doc/edge-server/copyright"

# -- man pages and shell completion, made by docs/reference/generate.py -----------------------------------------------
install -D -m 644 "$source/edge_server/cli/completions/edge-server.bash" "$root/usr/share/bash-completion/completions/edge-server"
install -D -m 644 "$source/edge_server/cli/completions/edge-server.zsh" "$root/usr/share/zsh/vendor-completions/_edge-server"
install -D -m 644 "$source/edge_server/cli/completions/edge-server.fish" "$root/usr/share/fish/vendor_completions.d/edge-server.fish"
install -d "$root/usr/share/man/man1"
for page in "$here"/man/*.1; do
  gzip -9nc "$page" >"$root/usr/share/man/man1/${page##*/}.gz"
done
chmod 644 "$root"/usr/share/man/man1/*

control=$root/DEBIAN
mkdir -p "$control"
echo /etc/edge_server/config.toml >"$control/conffiles"
install -m 755 "$here/deb/postinst" "$here/deb/prerm" "$here/deb/postrm" "$control/"
pack "$root" edge-server "$version" "$suffix" <<CONTROL
Architecture: $arch
Depends: edge-server-runtimes (= $runtimes), python$python, libc6 (>= 2.28)
Recommends: edge-server-models (>= $bundled), systemd
Description: small inference server for robots and edge boxes
 Serves models over Triton's HTTP and gRPC protocols, and camera frames over a stream of their own. With the package
 edge-server-runtimes it installs without a network.
CONTROL
printf '%s\n' "$out/edge-server_${version}_$suffix.deb" "$out/edge-server-runtimes_${runtimes}_$suffix.deb" \
  "$out/edge-server-models_${bundled}_all.deb"
