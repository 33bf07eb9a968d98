"""Runs: how ranks talk, the executor, gradient sums and state. Nothing is imported here: MPI starts at the first use."""
