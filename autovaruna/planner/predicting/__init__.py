"""Predicts the step of a plan by simulation."""
