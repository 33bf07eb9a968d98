"""Holds a step to account: runs a stage on samples that have just trained, whole and in parts, and compares."""
