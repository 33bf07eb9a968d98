"""Joins the rooms: `wrapper.AutoVaruna`. Nothing is imported here."""
