"""Watches what a trace goes by besides tensors: attributes, globals, modes, and state that a forward leaves."""
