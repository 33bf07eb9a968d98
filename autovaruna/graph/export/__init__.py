"""Runs torch.export on whatever users write, and says in their words where it cannot."""
