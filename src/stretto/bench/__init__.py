"""Benchmarks that ship with the package: `stretto bench NAME`."""
