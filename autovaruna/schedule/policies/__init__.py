"""Holds the policies, one a file."""
