#!/usr/bin/env bash
# Fetch what `make bench-peers` measures beside Braid: Python packages (with NATS) into .venv/peers, Kafka's JARs by Maven
# into .venv/kafka/libs. tools/kafka-jars.txt has their names and checksums.
set -euo pipefail
cd "$(dirname "$0")/.."
kafka=.venv/kafka

jars_are_there() {
    awk -v libs="$kafka/libs" '{ n = split($2, part, "/"); print $1 "  " libs "/" part[n] }' tools/kafka-jars.txt |
        sha256sum --check "$@"
}

[ -d .venv/peers ] || .venv/bin/python -m pip install --quiet --target .venv/peers --group peers
if ! jars_are_there --status 2>/dev/null; then
    mkdir -p "$kafka/libs"
    {
        echo '<project><modelVersion>4.0.0</modelVersion>'
        echo '<groupId>braid</groupId><artifactId>peers</artifactId><version>1</version><dependencies>'
        awk '{
            n = split($2, part, "/"); group = part[1]
            for (i = 2; i <= n - 3; i++) group = group "." part[i]
            printf "<dependency><groupId>%s</groupId><artifactId>%s</artifactId><version>%s</version></dependency>\n",
                group, part[n - 2], part[n - 1]
        }' tools/kafka-jars.txt
        echo '</dependencies></project>'
    } >"$kafka/pom.xml"
    mvn --quiet --batch-mode --file "$kafka/pom.xml" dependency:copy-dependencies \
        -DexcludeTransitive=true -DoutputDirectory=libs
    jars_are_there --quiet
fi
