"""Compares a graph with its model before it is split: outputs, state, and whether samples stay apart."""
