"""Traces: `nn.Module` in, `TracedModel` out. `graph.records` needs no torch, so nothing is imported here."""
