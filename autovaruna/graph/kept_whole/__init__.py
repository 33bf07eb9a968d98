"""Keeps submodules and functions whole that cannot be traced, and tries them out to learn what they do."""
