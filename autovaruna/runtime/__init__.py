"""Runs: how ranks talk, the executor, gradient sums, state. Nothing is imported here: MPI starts at its first use."""
