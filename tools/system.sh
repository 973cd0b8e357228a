#!/usr/bin/env bash
# Make sure of Debian packages: pairs of a package and the command that shows that it is there ("" = always install).
# As root they are installed; otherwise the message says what to install.
set -euo pipefail
missing=()
while [ $# -gt 0 ]; do
    { [ -n "$2" ] && command -v "$2" >/dev/null; } || missing+=("$1")
    shift 2
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "This needs Debian packages that are not installed. Please run:" >&2
    echo "    sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
