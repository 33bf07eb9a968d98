"""Collects the gradients of a step and sums them over ranks."""
