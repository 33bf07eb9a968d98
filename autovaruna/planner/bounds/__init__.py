"""Proves lower bounds on the step over all plans."""
