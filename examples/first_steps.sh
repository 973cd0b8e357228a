#!/usr/bin/env bash
# A broker, a topic, a million records, a kill -9, a second broker, a move: each command as a person types it, with what
# it prints.
# Run it by `make demo`, or with `braid` on the PATH. It uses free ports and a folder of its own.
set -euo pipefail
folder=$(mktemp -d)
cd "$folder"
read -r port admin_port port_2 admin_port_2 < <(python3 - <<'PY'
import socket
sockets = [socket.socket() for _ in range(4)]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))
PY
)
export BRAID_URL=braid://127.0.0.1:$port BRAID_LISTEN=127.0.0.1:$port BRAID_ADMIN=127.0.0.1:$admin_port NO_COLOR=1
broker=
second=
trap 'for each in $broker $second; do kill -9 "$each" 2>/dev/null || true; done; rm -rf "$folder"' EXIT

run() {
    printf '$ %s\n' "$1"
    eval "$1"
}

serve() {
    printf '$ braid serve%s &\n' "${*:+ $*}"
    : >ready
    braid serve "$@" >ready 2>>log &
    started=$!
    until grep -q data ready; do
        kill -0 "$started" || { cat log; exit 1; }
        sleep 0.05
    done
    sed "s|$folder|.|" ready
}

serve
broker=$started
run 'braid topic create orders'
run 'seq 1 1000000 | braid produce orders'
run 'braid consume orders -s billing --count 3'
printf '$ kill -9 %%1\n'
kill -9 "$broker"
wait "$broker" 2>/dev/null || true
serve
broker=$started
run 'braid consume orders -s billing --count 3'
run 'braid consume orders -s audit | md5sum; seq 1 1000000 | md5sum'
run 'braid subscription show orders billing | tail -2'
serve --id broker-2 --metadata sqlite:braid-data/metadata.db --data data-2 \
    --listen "127.0.0.1:$port_2" --admin "127.0.0.1:$admin_port_2"
second=$started
run "export BRAID_URL=braid://127.0.0.1:$port,127.0.0.1:$port_2"
run 'braid topic move orders --to broker-2'
printf '$ kill %%1\n'
kill "$broker"
wait "$broker"
broker=
run 'braid consume orders -s billing --count 3'
printf '$ kill %%2\n'
kill "$second"
wait "$second"
second=
