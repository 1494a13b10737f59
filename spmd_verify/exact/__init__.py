"""Exact mode: steps in which any order of summation gives the same bits."""
