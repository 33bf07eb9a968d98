"""Runs a step: the program of a rank, its executor, gradients, outputs, the optimizer."""
