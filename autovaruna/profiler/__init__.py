"""Measures: `TracedModel` in, `Profile` out. `profiler.records` needs no torch, so nothing is imported here."""
