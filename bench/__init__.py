"""Benchmarks and the reference models. `python -m bench --help` lists the suites."""
