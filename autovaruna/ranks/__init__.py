"""How ranks talk: transports, exchanges, sums, launchers. Nothing is imported here: MPI starts at its first use."""
