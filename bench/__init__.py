"""Measurements, simulation and the pure engine model. Uses the very indexer and scorer that serve."""
