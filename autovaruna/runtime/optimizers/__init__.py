"""Lets optimizers step over the part of a rank, with the norm and the scale of all of them."""
