#!/bin/sh
# Install Home Assistant's core with its MQTT integration into a virtual environment of its own:
#
#     eval "$(tests/plugins/cameras/sinks/fetch_home_assistant.sh DEST)" && python -m pytest -m full tests/plugins/cameras/sinks
#
# Needs Python 3.11 or 3.12. A second call with the same DEST installs nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    python=$(command -v python3.11 || command -v python3.12 || command -v python3)
    "$python" -m venv "$dest"
    # What the MQTT integration and those that it depends on need besides the core.
    "$dest/bin/pip" install -q homeassistant==2024.3.3 paho-mqtt==1.6.1 janus==1.0.0 >&2
    touch "$dest/complete"
fi

"$dest/bin/python" -c 'import homeassistant.components.mqtt' >&2
printf "export EDGE_TEST_HOME_ASSISTANT='%s'\n" "$dest/bin/python"
