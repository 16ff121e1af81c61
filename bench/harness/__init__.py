"""The harness of bench/run: see bench/README.md."""
