# Every target installs what it needs into .venv first. `make` alone lists the targets.
PYTHON ?= python3
JAVA := default-jre-headless java
BIN := .venv/bin
SEEDS ?= 2000
SECONDS ?= 120
METADATA ?= sqlite
STORAGE ?= shared
BROKERS ?= 4
IMAGE ?=
# Options of the benchmarks beside peers, such as --quick.
PEERS ?=
# The tests start hundreds of processes. Without compiled modules each of them would compile Braid anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo up lint test suite check quick-tests format simulate chaos mutants bench peers bench-peers bench-kafka image site lock clean

help:
	@echo "make demo      a broker, a topic, a kill -9, a move; a program; a cluster under load; a split; a lost machine; a task queue; storage; Spark"
	@echo "make up        a cluster of three brokers with a web console, until Ctrl-C"
	@echo "make test      install what is missing and run the whole test suite"
	@echo "make check     format, lint, types, import layers, quick tests (under two minutes)"
	@echo "make simulate  many seeds of the simulations of storage, broker, cluster and replicas (SEEDS=$(SEEDS))"
	@echo "make chaos     real brokers that are killed, frozen, cut off and wiped under load (SECONDS=$(SECONDS))"
	@echo "make mutants   plant known defects in a copy of the code, and see a test notice each of them"
	@echo "make bench     benchmarks against the limits of this machine"
	@echo "make peers         fetch the brokers that Braid is measured beside: Kafka, NATS, Redis, RabbitMQ"
	@echo "make bench-peers   beside those that are there"
	@echo "make bench-kafka   three brokers beside three Kafka nodes, if KAFKA_HOME names a Kafka 4"
	@echo "make image     build the image and boot the systemd unit, and use both, in containers of Podman (as root)"
	@echo "make site      the documentation as a site, in build/site; a broken link is an error"
	@echo "make format    let ruff format and fix what it can"
	@echo "make lock      write constraints.txt anew from what is installed"

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt tools/setup.sh
	bash tools/setup.sh $(PYTHON)
	touch $@

demo: setup
	bash tools/system.sh $(JAVA)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/first_steps.sh
	$(BIN)/python examples/shop.py
	$(BIN)/python examples/timeline.py
	$(BIN)/python examples/split_and_merge.py
	$(BIN)/python examples/lost_machine.py
	$(BIN)/python examples/task_queue.py
	$(BIN)/python examples/storage.py
	$(BIN)/python examples/clickstream.py

up: setup
	$(BIN)/braid up --brokers 3 --console

lint: setup
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy --no-error-summary

test: setup
	bash tools/system.sh etcd-server etcd openssl openssl chromium chromium prometheus promtool systemd systemd-analyze $(JAVA)
	$(MAKE) --jobs 2 lint suite

# Tests often wait for processes, and the archive is made on one core and a half: the linters use the rest.
suite: .venv/spark.jsa
	$(BIN)/python -m pytest -n 2 tests

# Spark's classes, for quick starts of Java in tests.
.venv/spark.jsa: .venv/installed
	$(BIN)/python -m tests.spark.java_archive 2> $@.log || { cat $@.log; exit 1; }

# mypy takes one core, so the tests do not wait for it.
check: setup
	$(MAKE) --jobs 2 lint quick-tests

quick-tests: setup
	BRAID_EXAMPLES_PERCENT=20 $(BIN)/python -m pytest -n 2 tests/unit tests/component tests/property
	$(BIN)/python -m braid.testing.simulate log --seeds 20 --processes 2
	$(BIN)/python -m braid.testing.simulate broker --seeds 4 --processes 2
	$(BIN)/python -m braid.testing.simulate cluster --seeds 4 --processes 2

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

simulate: setup
	$(BIN)/python -m braid.testing.simulate log --seeds $(SEEDS)
	$(BIN)/python -m braid.testing.simulate broker --seeds $(SEEDS)
	$(BIN)/python -m braid.testing.simulate cluster --seeds $(SEEDS)
	$(BIN)/python -m braid.testing.simulate replicas --seeds $(SEEDS)
	$(BIN)/python -m braid.testing.simulate queues --seeds $(SEEDS)
	$(BIN)/python -m tests.kits.replicated_world --seeds $(SEEDS)

# SEED= repeats the faults of a run. METADATA=etcd, STORAGE=local.
chaos: setup
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) --metadata $(METADATA) --storage $(STORAGE) \
	    --brokers $(BROKERS) --seed "$(SEED)"

mutants: setup
	$(BIN)/python -m tests.mutants

bench: setup
	$(BIN)/python -m benchmarks

peers: setup
	bash tools/system.sh redis-server redis-server rabbitmq-server rabbitmqctl $(JAVA)
	bash tools/peers.sh

# Peers stay out of the environment of Braid and its tests.
WITH_PEERS = PYTHONPATH=.venv/peers PATH="$(CURDIR)/.venv/peers/bin:$$PATH" KAFKA_HOME="$${KAFKA_HOME:-$(CURDIR)/.venv/kafka}"

bench-peers: setup
	$(WITH_PEERS) $(BIN)/python -m benchmarks.peers $(PEERS)
	$(WITH_PEERS) $(BIN)/python -m benchmarks.queue_peers $(PEERS)

bench-kafka: setup
	$(WITH_PEERS) $(BIN)/python -m benchmarks.kafka_replicas

# Needs no registry of images, and no systemd on this machine. IMAGE="--python 3.13": another version than 3.11.
image: setup
	bash tools/system.sh podman podman runc runc netavark /usr/lib/podman/netavark iptables iptables \
	    mmdebstrap mmdebstrap systemd-container systemd-nspawn
	$(BIN)/python -m tests.image $(IMAGE)

site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in build/site. To look at it: python3 -m http.server --directory build/site"

lock: setup
	bash tools/lock.sh

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis build dist
