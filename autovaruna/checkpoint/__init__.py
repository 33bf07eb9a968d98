"""Keeps the state of a run on disk, by parameter name: written by all ranks, read by any number of them."""
