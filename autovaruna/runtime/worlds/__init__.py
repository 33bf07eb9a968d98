"""Lets ranks talk: worlds of ranks, whatever carries the bytes, in which no wait lasts for ever."""
