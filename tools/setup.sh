#!/usr/bin/env bash
# Make .venv and install Braid with everything that its tests need, in the versions of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Braid needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11")
PY
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    bash tools/system.sh python3-venv ""
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[etcd]' --group dev
