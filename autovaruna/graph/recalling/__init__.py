"""Recalls what a trace has done before: repeated operations and layers are not run again."""
