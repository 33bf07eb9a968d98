"""Joins AutoVaruna to libraries that own the training loop; each file is imported by those who use its library."""
