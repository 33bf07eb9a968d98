"""Moves bytes between ranks: MPI with rings of shared memory, threads of one process, and torch.distributed."""
