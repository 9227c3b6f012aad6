"""Ranks, hosts, process groups and their agreement."""
