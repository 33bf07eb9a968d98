"""Scripts of the kinds that people have, each with the smallest change."""
