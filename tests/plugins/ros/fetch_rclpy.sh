#!/bin/sh
# Install rclpy of ROS 2 Jazzy and Kilted from PyPI, each into a virtual environment of its own. On x86-64 alone:
#
#     eval "$(tests/plugins/ros/fetch_rclpy.sh DEST)" && python -m pytest -m soak tests/plugins/ros/test_live_ros2.py
#
# A second call with the same DEST installs nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
[ "$(uname -m)" = x86_64 ] || { echo "$0: PyPI has rclpy for x86-64 alone" >&2; exit 1; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

# install DISTRIBUTION PACKAGE...
install() {
    folder=$dest/$1
    shift
    [ -e "$folder/complete" ] || {
        python3 -m venv "$folder" && "$folder/bin/pip" install -q "$@" >&2 && touch "$folder/complete"
    }
    "$folder/bin/python" -c 'import rclpy, sensor_msgs.msg' >&2
}

install jazzy 'ros-jazzy-rclpy[fastrtps]' ros-jazzy-sensor-msgs
install kilted ros-rclpy ros-sensor-msgs ros-rmw-fastrtps-cpp
printf "export EDGE_TEST_RCLPY='%s'\n" "$dest"
