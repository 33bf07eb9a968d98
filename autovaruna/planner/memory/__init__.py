"""Predicts the memory of stages and ranks, and fits stages into it."""
