"""Follows the batch through a graph: where samples meet, what is of all of them, and how parts are joined."""
