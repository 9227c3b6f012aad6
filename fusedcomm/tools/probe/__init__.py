"""``fusedcomm probe``: measures a cluster for a minute, and predicts what fusedcomm does to a training step there.

team.py       lets ranks act together
fit.py        fits costs to times
network.py    measures the network as DDP and the engine use it
local.py      measures the codec, copies and cores (traced.py: the codec on accelerators)
workload.py   the step: a user's or a synthetic one
choices.py    predicts the step of each choice with cost_model.py, and recommends one
steps.py      takes real steps through DDP, and measures the core time of communication in them
check.py      compares predictions with real steps
speed.py      corrects predictions by real steps
run.py        runs all of these in turn, within the given time
report.py, plot.py      write the findings
command.py, launch.py   read the arguments and start the ranks
"""
