#!/usr/bin/env bash
# Write constraints.txt: the exact versions that the tests ran with.
set -euo pipefail
cd "$(dirname "$0")/.."
locked=$(mktemp)
{
    echo "# The versions that Braid is tested with; written by \`make lock\`."
    {
        .venv/bin/python -m pip freeze --exclude-editable --exclude braid
        grep -E '^(pyspark|py4j)==' constraints.txt # of the extra `spark`, which the tests do not install yet
    } | sort -f -u
} >"$locked"
mv "$locked" constraints.txt
