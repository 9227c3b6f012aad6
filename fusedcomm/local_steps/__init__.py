"""Local steps: ranks train by themselves, and merge their parameters every few steps."""
