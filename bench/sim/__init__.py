"""Fleets of engines in simulated time: the engine model, transfers, events and load around the very planner."""
