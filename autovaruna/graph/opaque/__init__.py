"""Runs what cannot be traced as one node: modules and functions that stay as they are."""
