"""`python -m tests.chaos`: real brokers, real faults, and a check of what came out of it (docs/simulation.md)."""
