"""Holds the commands of ``python -m autovaruna``, one a file: each adds its options to the parser, and runs."""
