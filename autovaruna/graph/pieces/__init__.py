"""Takes pieces out of a graph, and runs them."""
