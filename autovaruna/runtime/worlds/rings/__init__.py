"""Carries small messages between the ranks of a host through memory that both see."""
