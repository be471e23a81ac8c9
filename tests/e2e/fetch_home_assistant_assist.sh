#!/bin/sh
# Install Home Assistant's core with its integrations for Assist, Wyoming and ollama into a virtual environment of its own:
#
#     eval "$(tests/e2e/fetch_home_assistant_assist.sh DEST)" && python -m pytest -m long tests/e2e/test_*speech.py
#
# Needs Python 3.13, as python3.13, of pyenv or $PYTHON. A second call with the same DEST installs nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    python=${PYTHON:-}
    for found in python3.13 "$HOME"/.pyenv/versions/3.13.*/bin/python; do
        # The command python3.13 of pyenv fails if another version is chosen.
        if [ -z "$python" ] && "$found" -c '' 2>/dev/null; then python=$found; fi
    done
    "${python:-python3.13}" -m venv "$dest"
    # What the integrations and those that they depend on need besides the core, as their manifests say.
    "$dest/bin/pip" install -q homeassistant==2025.3.4 ollama==0.4.7 wyoming==1.5.4 pymicro-vad==1.0.1 pyspeex-noise==1.0.2 \
        hassil==2.2.3 home-assistant-intents==2025.3.5 ha-ffmpeg==3.2.2 mutagen==1.47.0 >&2
    touch "$dest/complete"
fi

"$dest/bin/python" -c 'import homeassistant.components.assist_pipeline' >&2
printf "export EDGE_TEST_HOME_ASSISTANT_ASSIST='%s'\n" "$dest/bin/python"
