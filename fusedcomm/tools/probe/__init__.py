"""``fusedcomm probe``: a minute on a cluster, and what fusedcomm would do to a training step there.

team.py       ranks acting together
fit.py        costs from times
network.py    links, as DDP and the engine use them
local.py      the codec, copies, cores (traced.py: the codec on accelerators)
workload.py   the step: a user's, or a synthetic one
choices.py    predictions by cost_model.py, and which choice to take
steps.py      real steps through DDP, and what moving bytes takes of the cores meanwhile
check.py      the prediction beside real steps
run.py        all of these in turn, within the time given
report.py, plot.py, command.py, launch.py
"""
