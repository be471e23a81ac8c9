#!/bin/sh
# Make a virtual environment with colcon, the build tool of ROS 2, as far as it is on PyPI:
#
#     eval "$(tests/plugins/ros/fetch_colcon.sh DEST)" && python -m pytest -m full tests/plugins/ros/test_ros2_package.py
#
# It is kept apart because colcon-core brings plugins of pytest along. A second call with the same DEST fetches nothing.
# Prints one export line for the shell. PYTHON names the interpreter to use.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -x "$dest/bin/colcon" ]; then
    "${PYTHON:-python3}" -m venv "$dest" >&2
    # Newer setuptools refuse the `setup.py develop` that colcon calls.
    "$dest/bin/pip" install --quiet 'setuptools<80' colcon-output colcon-package-information colcon-ros >&2
fi
printf "export EDGE_TEST_COLCON='%s'\n" "$dest/bin/colcon"
