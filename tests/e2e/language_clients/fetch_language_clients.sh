#!/bin/sh
# Make an environment for each client of language models, from PyPI and npm's registry:
#
#     eval "$(tests/e2e/language_clients/fetch_language_clients.sh DEST)" && python -m pytest -m long tests/e2e/language_clients
#
# They take 1.8 GB. AIPerf needs Python 3.11 to 3.13. A client that cannot be installed is left out, and its test skips.
# A second call with the same DEST installs what is missing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

# environment NAME PACKAGE...
environment() {
    name=$1
    shift
    [ -e "$dest/$name/complete" ] && return
    python3 -m venv "$dest/$name" >&2 && "$dest/$name/bin/pip" install -q --no-compile "$@" >&2 &&
        touch "$dest/$name/complete" || echo "$0: $name is not installed" >&2
}

environment litellm litellm==1.110.2
environment langchain langchain-openai==1.7.4 langchain-ollama==1.1.0 langchain-anthropic==1.7.10 \
    langchain-community==0.4.2
environment instructor instructor==1.17.0
environment openai_agents openai-agents==0.24.0
environment pydantic_ai 'pydantic-ai-slim[openai,anthropic]==2.68.0'
environment llm llm==0.36
environment cohere cohere==7.3.1
environment aiperf aiperf==0.13.0
# node_environment NAME PACKAGE
node_environment() {
    [ -e "$dest/$1/complete" ] && return
    mkdir -p "$dest/$1"
    npm install --prefix "$dest/$1" --no-audit --no-fund --ignore-scripts --no-package-lock "$2" >&2 &&
        touch "$dest/$1/complete" || echo "$0: $1 is not installed" >&2
}

node_environment openai openai@6.49.0
node_environment continue @continuedev/cli@1.5.47
printf "export EDGE_TEST_LANGUAGE_CLIENTS='%s'\n" "$dest"
