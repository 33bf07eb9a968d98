"""Tests, one folder a room; `catalogue` holds the models and `reference` the numbers of plain PyTorch."""
