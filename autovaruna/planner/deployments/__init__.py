"""Keeps plans: as a file that a person may edit, with what they are valid for."""
