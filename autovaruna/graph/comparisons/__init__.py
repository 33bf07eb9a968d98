"""Compares what a graph gives with what its model gives, and what a whole batch gives with what its parts give."""
