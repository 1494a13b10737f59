"""Drawn models: random training programs, judged under the engine's styles, shrunk, written."""
