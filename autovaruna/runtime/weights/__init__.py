"""Gives each rank its part of the model's weights, and puts them together again."""
