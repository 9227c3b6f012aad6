"""``fusedcomm demo``: shows whether a compressed wire changes what a model learns, and what it saves.

launch.py starts the ranks, training.py trains and measures, report.py summarizes and writes.
"""

MAX_RANKS = 64
"""A rank then has 19 of the 1257 training digits, a little more than half a batch."""
