"""Baselines: what was accepted, what changed since, and how it went over time."""
