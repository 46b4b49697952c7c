"""Deterministic simulation testing: from a seed, a random world; invariants after every event."""
