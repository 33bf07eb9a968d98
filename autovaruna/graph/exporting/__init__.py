"""Runs torch.export on any model of a user: what it stops at is traced another way, or said in words."""
