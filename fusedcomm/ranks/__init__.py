"""Ranks: their agreement, their hosts, and the process groups that connect them."""
