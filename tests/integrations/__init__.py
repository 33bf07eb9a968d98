"""Tests of what joins AutoVaruna to libraries that own the loop; each is skipped where its library is missing."""

SETTINGS = {"progress": False, "save_deployment": False, "num_stages": 2, "profile_iterations": 1}
