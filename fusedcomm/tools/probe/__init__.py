"""``fusedcomm probe``: takes real steps of a model with each choice, in turns, and recommends one.

team.py       lets ranks act together
script.py, workload.py   the step: a user's or a synthetic one
choices.py    the choices, and which one to recommend
steps.py      real steps with each choice
run.py        the stages, within the given time
progress.py, report.py   what is shown and written
command.py, launch.py   read the arguments and start the ranks
"""
