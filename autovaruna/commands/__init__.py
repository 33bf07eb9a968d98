"""Holds the commands of ``python -m autovaruna``, one a file, but for those of jobs: each adds its options and runs."""
