#!/usr/bin/env bash
# A broker, a topic, a million records, a kill -9: each command as a person types it, with what it prints.
# Run it by `make demo`, or with `braid` on the PATH. It uses free ports and a folder of its own.
set -euo pipefail
folder=$(mktemp -d)
cd "$folder"
read -r port admin_port < <(python3 - <<'PY'
import socket
with socket.socket() as one, socket.socket() as two:
    one.bind(("127.0.0.1", 0))
    two.bind(("127.0.0.1", 0))
    print(one.getsockname()[1], two.getsockname()[1])
PY
)
export BRAID_URL=braid://127.0.0.1:$port BRAID_LISTEN=127.0.0.1:$port BRAID_ADMIN=127.0.0.1:$admin_port NO_COLOR=1
broker=
trap '[ -z "$broker" ] || kill -9 "$broker" 2>/dev/null || true; rm -rf "$folder"' EXIT

run() {
    printf '$ %s\n' "$1"
    eval "$1"
}

serve() {
    printf '$ braid serve &\n'
    : >ready
    braid serve >ready 2>>log &
    broker=$!
    until grep -q data ready; do
        kill -0 "$broker" || { cat log; exit 1; }
        sleep 0.05
    done
    sed "s|$folder|.|" ready
}

serve
run 'braid topic create orders'
run 'seq 1 1000000 | braid produce orders'
run 'braid consume orders -s billing --count 3'
printf '$ kill -9 %%1\n'
kill -9 "$broker"
wait "$broker" 2>/dev/null || true
serve
run 'braid consume orders -s billing --count 3'
run 'braid consume orders -s audit | md5sum; seq 1 1000000 | md5sum'
run 'braid subscription show orders billing | tail -2'
run 'braid topic split orders 0 2>&1 || true'
printf '$ kill %%1\n'
kill "$broker"
wait "$broker"
broker=
