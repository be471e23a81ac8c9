#!/usr/bin/env bash
# Install edge_server on a Jetson with JetPack 6 or 7 as a service that runs without root:
#
#     sudo jetson/install.sh              install, or bring an installation up to date; may be run again and again
#     jetson/install.sh --dry-run         say what would be done, and change nothing; needs no root
#     sudo jetson/install.sh --uninstall  remove it; models and settings stay
#     sudo jetson/install.sh --uninstall --purge  remove these too
#
#     --wheels DIR   take Python packages from a folder of wheels, without a network
#     --extras LIST  extras of pyproject.toml (default: vision,onnxruntime,signatures)
#     --no-start     enable the service, do not start it
#     --root DIR     look for the board's files, and put files, below DIR (tests)
#
# It detects board, L4T and JetPack, takes TensorRT's Python package from apt if it is missing, makes an environment that
# sees the system's packages (TensorRT is installed for the system's Python alone), and puts the unit in place.
set -euo pipefail
# The service's user reads all of it, whatever root's umask is here.
umask 022

say() { printf '%s\n' "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
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

root='' dry='' uninstall='' purge='' wheels='' extras=vision,onnxruntime,signatures start=--now
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry=yes ;;
    --uninstall) uninstall=yes ;;
    --purge) purge=yes ;;
    --no-start) start='' ;;
    --wheels | --extras | --root)
      [ $# -ge 2 ] || usage
      case $1 in
        --wheels) wheels=$2 ;;
        --extras) extras=$2 ;;
        --root) root=${2%/} ;;
      esac
      shift
      ;;
    *) usage ;;
  esac
  shift
done
[ -z "$purge" ] || [ -n "$uninstall" ] || die "--purge goes with --uninstall"
source=$(cd "$(dirname "$0")/.." && pwd)
home=/opt/edge_server
changes=0

# run COMMAND ...: do it, or say that it would be done.
run() {
  changes=$((changes + 1))
  if [ -n "$dry" ]; then
    printf 'would run:'
    printf ' %q' "$@"
    printf '\n'
  else
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    "$@"
  fi
}

# put MODE FILE PATH: install a file of this clone, unless just this is there already.
put() {
  if ! cmp -s "$2" "$root$3"; then
    touch_up
    run install -D -m "$1" "$2" "$root$3"
  fi
}

# touch_up: note that the service has to be started anew, also for the next run should this one break off.
touch_up() {
  touched=yes
  if [ -z "$dry" ]; then : >"$root$home/.unfinished"; fi
}

systemctl_if_booted() {
  if [ -d "$root/run/systemd/system" ]; then run systemctl "$@"; fi
}

# -- the board --------------------------------------------------------------------------------------------------------
text_of() { if [ -r "$root$1" ]; then tr '\0' '\n' <"$root$1"; fi; }

detect() {
  board=$(text_of /proc/device-tree/model | head -n 1)
  chip=$(text_of /proc/device-tree/compatible | sed -n 's/^nvidia,\(tegra[0-9]*\)$/\1/p' | head -n 1)
  [ -n "$chip" ] || die "this is no Jetson (no nvidia,tegra... in /proc/device-tree/compatible); on other boxes, see systemd/README.md"
  local release
  release=$(text_of /etc/nv_tegra_release | sed -n 's/^# R\([0-9]*\) .*REVISION: \([0-9.]*\).*/\1.\2/p' | head -n 1)
  if [ -z "$release" ]; then
    # Some images lack the file; the package has the same number in front of its build.
    release=$(dpkg-query --show --showformat='${Version}' nvidia-l4t-core 2>/dev/null | sed -n 's/^\([0-9.]*\).*/\1/p') || true
  fi
  l4t=${release%.}
  case $l4t in
    36.*) jetpack=6 wanted=3.10 ;;
    38.* | 39.*) jetpack=7 wanted=3.12 ;;
    35.* | 34.* | 32.*) die "L4T $l4t is JetPack 5 or older, whose Python is too old: flash JetPack 6 or 7" ;;
    '') die "neither /etc/nv_tegra_release nor the package nvidia-l4t-core tells the release of L4T" ;;
    *) die "L4T $l4t is of no JetPack that this script knows (36: JetPack 6, 38 and 39: JetPack 7)" ;;
  esac
  python=$root/usr/bin/python3
  [ -x "$python" ] || die "there is no $python"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [ "$version" = "$wanted" ] ||
    die "/usr/bin/python3 is Python $version, JetPack $jetpack has $wanted: TensorRT's packages are for that one"
  tensorrt=$(installed python3-libnvinfer || true)
  say "board:    ${board:-unknown} ($chip)"
  say "software: L4T $l4t, JetPack $jetpack, Python $version"
  say "TensorRT: ${tensorrt:-not installed}"
}

# installed PACKAGE: print its version, fail when it is not installed.
installed() {
  local status
  status=$(dpkg-query --show --showformat='${db:Status-Status} ${Version}' "$1" 2>/dev/null) || return 1
  [ "${status%% *}" = installed ] && printf '%s' "${status#* }"
}

# -- the steps --------------------------------------------------------------------------------------------------------
install_packages() {
  local missing=() name
  for name in python3-venv python3-libnvinfer; do
    installed "$name" >/dev/null || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  # Unattended, and without what is only recommended: a board's disk is small.
  run env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}" ||
    die "apt-get could not install ${missing[*]}: run apt-get update, or install without a network from a .deb (systemd/README.md)"
}

# What the environment was made from: the files of the package, and what is asked of pip.
stamp() {
  (
    cd "$source"
    find edge_server pyproject.toml -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    printf '%s %s %s\n' "$version" "$extras" "$wheels"
  ) | sha256sum | cut -d ' ' -f 1
}

install_environment() {
  local venv=$root$home now
  if [ -x "$venv/bin/python" ] && ! "$venv/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"; then
    run rm -rf "$venv"
  fi
  if [ ! -x "$venv/bin/python" ] || ! grep -qi '^include-system-site-packages *= *true' "$venv/pyvenv.cfg"; then
    run "$python" -m venv --system-site-packages "$venv"
  fi
  now=$(stamp)
  if [ "$(cat "$venv/.installed" 2>/dev/null || true)" != "$now" ]; then
    local index=()
    [ -z "$wheels" ] || index=(--no-index --find-links "$wheels")
    touch_up
    run "$venv/bin/python" -m pip install --quiet --upgrade "${index[@]}" "${source}[$extras]"
    [ -n "$dry" ] || printf '%s\n' "$now" >"$venv/.installed"
  fi
}

install_service() {
  put 644 "$source/systemd/sysusers.conf" /etc/sysusers.d/edge-server.conf
  put 644 "$source/systemd/tmpfiles.conf" /etc/tmpfiles.d/edge-server.conf
  if ! grep -q '^edge:' "$root/etc/passwd" 2>/dev/null; then
    run systemd-sysusers ${root:+"--root=$root"} edge-server.conf
  fi
  if [ ! -d "$root/var/lib/edge_server/models" ]; then
    run systemd-tmpfiles ${root:+"--root=$root"} --create edge-server.conf
  fi
  put 644 "$source/jetson/udev.rules" /etc/udev/rules.d/90-edge-server.rules
  [ -e "$root/etc/edge_server/config.toml" ] || put 644 "$source/systemd/config.toml" /etc/edge_server/config.toml
  put 644 "$source/systemd/edge-server.service" /etc/systemd/system/edge-server.service
  put 644 "$source/systemd/edge-server-nvgpu.service" /etc/systemd/system/edge-server-nvgpu.service
  put 644 "$source/systemd/edge-server.service.d/jetson.conf" /etc/systemd/system/edge-server.service.d/box.conf
}

install_all() {
  touched=''
  if [ -e "$root$home/.unfinished" ]; then touched=yes; fi
  install_packages
  install_environment
  install_service
  if [ -n "$touched" ]; then
    systemctl_if_booted daemon-reload
    if command -v udevadm >/dev/null && [ -d "$root/run/udev" ]; then
      run udevadm control --reload
      run udevadm trigger
    fi
  fi
  if [ ! -e "$root/etc/systemd/system/multi-user.target.wants/edge-server.service" ]; then
    systemctl_if_booted enable ${start:+"$start"} edge-server.service
  elif [ -n "$touched" ] && [ -n "$start" ]; then
    systemctl_if_booted restart edge-server.service
  fi
  if [ -z "$dry" ]; then rm -f "$root$home/.unfinished"; fi
  if [ "$changes" -eq 0 ]; then
    say "nothing to do: all of it is installed"
  elif [ -z "$dry" ]; then
    say "done; models go to /var/lib/edge_server/models, and $home/bin/edge-server doctor --user=edge looks at this board"
  fi
}

uninstall_all() {
  if [ -e "$root/etc/systemd/system/edge-server.service" ]; then
    systemctl_if_booted disable --now edge-server.service
  fi
  local path
  for path in /etc/systemd/system/edge-server.service /etc/systemd/system/edge-server.service.d/box.conf \
    /etc/systemd/system/edge-server-nvgpu.service \
    /etc/udev/rules.d/90-edge-server.rules /etc/tmpfiles.d/edge-server.conf /etc/sysusers.d/edge-server.conf; do
    if [ -e "$root$path" ]; then run rm -f "$root$path"; fi
  done
  # Drop-ins of the operator's own stay, and with them the folder.
  if [ -d "$root/etc/systemd/system/edge-server.service.d" ] &&
    [ -z "$(find "$root/etc/systemd/system/edge-server.service.d" -mindepth 1 ! -name box.conf -print -quit)" ]; then
    run rm -rf "$root/etc/systemd/system/edge-server.service.d"
  fi
  if [ -e "$root$home" ]; then run rm -rf "$root$home"; fi
  if [ -n "$purge" ]; then
    for path in /etc/edge_server /var/lib/edge_server /var/cache/edge_server; do
      if [ -e "$root$path" ]; then run rm -rf "$root$path"; fi
    done
    if [ -z "$root" ] && getent passwd edge >/dev/null; then run userdel edge; fi
  fi
  systemctl_if_booted daemon-reload
  say "removed; packages of apt stay${purge:+, everything else is gone}"
}

[ -n "$dry" ] || [ -n "$root" ] || [ "$(id -u)" -eq 0 ] || die "needs root: sudo $0 (or --dry-run)"
if [ -n "$uninstall" ]; then
  uninstall_all
else
  detect
  install_all
fi
