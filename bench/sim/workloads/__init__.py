"""Loads: replayed traces, published benchmarks, generated mixes."""
