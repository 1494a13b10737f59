"""Reproducing scripts: one cell of a record as plain torch and gloo."""
