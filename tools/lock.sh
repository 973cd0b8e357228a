#!/usr/bin/env bash
# Write constraints.txt: the exact versions that the tests ran with.
set -euo pipefail
cd "$(dirname "$0")/.."
locked=$(mktemp)
{
    echo "# The versions that Braid is tested with; written by \`make lock\`."
    .venv/bin/python -m pip freeze --exclude-editable --exclude braidmq | sort -f -u
} >"$locked"
mv "$locked" constraints.txt
