"""Optimizers that count their steps, each in another way."""

import torch


class Counts(torch.optim.Optimizer):
    """SGD whose rate grows with the number of its steps, which it counts in each group."""

    def __init__(self, params, lr=0.01, **others):
        super().__init__(params, {"lr": lr, **others})

    def count(self, group):
        """Counts a step, and returns the number."""
        group["step"] += 1
        return group["step"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            number = self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * number / 8 * p.grad)


class FromTheStart(Counts):
    def __init__(self, params, lr=0.01, step=0):
        super().__init__(params, lr, step=step)


class Lazily(Counts):
    def count(self, group):
        group["step"] = group.get("step", 0) + 1
        return group["step"]


class InATensor(Counts):
    """As with capturable=True, in place."""

    def count(self, group):
        return group.setdefault("step", torch.zeros(())).add_(1).item()


class IfThereAreGradients(Lazily):
    """As optimizers that go on with the next group if one is empty."""

    def count(self, group):
        if all(p.grad is None for p in group["params"]):
            return 0
        return super().count(group)


class InItself(Counts):
    """Not in groups, but of each call."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step()

    def count(self, group):
        return self.calls


class OfAllGradients(Counts):
    """As those that estimate their rate."""

    def count(self, group):
        group["norm"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        return 1


COUNTING = [FromTheStart, Lazily, InATensor, IfThereAreGradients, InItself]
"""Those that a ShardedOptimizer can step."""
