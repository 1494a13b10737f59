"""Decisions within noise: found, forced, replayed."""
