"""Carries tensors between the devices of ranks, and measures what that costs."""
