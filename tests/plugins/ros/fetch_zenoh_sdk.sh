#!/bin/sh
# Make a virtual environment with zenoh-ros2-sdk, a node of rmw_zenoh by others than ROS and this project:
#
#     eval "$(tests/plugins/ros/fetch_zenoh_sdk.sh DEST)" && python -m pytest -m soak tests/plugins/ros/test_zenoh_sdk.py
#
# A second call with the same DEST fetches nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    "${PYTHON:-python3}" -m venv "$dest" >&2
    "$dest/bin/pip" install --quiet --no-compile zenoh-ros2-sdk==0.1.8 >&2
    touch "$dest/complete"
fi
printf "export EDGE_TEST_ZENOH_SDK='%s'\n" "$dest/bin/python"
