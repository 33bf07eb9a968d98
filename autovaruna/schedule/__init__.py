"""Schedules: instructions as data, policies that order them, rules, and the simulator."""
