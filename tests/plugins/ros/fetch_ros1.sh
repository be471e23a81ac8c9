#!/bin/sh
# Fetch a ROS 1 master and rospy into a folder, on Debian or Ubuntu with ROS in its own archive, without root:
#
#     eval "$(tests/plugins/ros/fetch_ros1.sh DEST)" && python -m pytest -m full tests/e2e/test_ros1_bridge.py
#
# All packages are pure Python, so any interpreter from 3.10 runs them; it needs PyYAML besides. vision_msgs is in no
# archive for ROS 1: the bridge makes its classes from the definitions. A second call with the same DEST fetches nothing.
# Prints two export lines for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
packages="
    python3-rospy python3-rosmaster python3-rosgraph python3-roslib python3-rospkg
    python3-genpy python3-genmsg python3-std-msgs python3-sensor-msgs python3-geometry-msgs python3-rosgraph-msgs
    python3-roscpp-msg python3-catkin python3-catkin-pkg python3-defusedxml python3-dateutil python3-docutils
    python3-pyparsing python3-six"

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
        touch complete
    )
fi

modules="$dest/usr/lib/python3/dist-packages"
[ -d "$modules/rospy" ] || { echo "$0: the packages hold no rospy" >&2; exit 1; }
printf "export EDGE_TEST_ROS1_PYTHONPATH='%s'\n" "$modules"
printf "export EDGE_TEST_ROS1_MASTER='%s'\n" "$dest/usr/bin/rosmaster"
