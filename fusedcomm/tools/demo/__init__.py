"""``fusedcomm demo``: does a compressed wire change what a model learns, and what does it save?

launch.py starts the ranks, training.py trains and measures, results.py sums up, report.py writes the table and the
JSON, picture.py the picture.
"""
