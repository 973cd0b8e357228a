#!/usr/bin/env bash
# Make .venv and install Braid with everything that its tests need, in the versions of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit("Braid needs Python 3.11 or newer; %s is %s. Try: make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))
PY
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    bash tools/system.sh python3-venv ""
fi
[ "$(.venv/bin/python -c 'import sys; print(sys.version_info[:2])' 2>/dev/null)" = \
    "$("$python" -c 'import sys; print(sys.version_info[:2])')" ] || rm -rf .venv
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
# Checkouts of early versions installed the distribution as braid. Both names would own the same command.
.venv/bin/python -m pip uninstall --quiet --quiet --yes braid
.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[server,etcd,spark,otel,console]' --group dev --group docs
