"""bench/local_steps.py: the table of its results."""

import pytest


@pytest.fixture
def bench(bench_modules):
    import local_steps

    return local_steps


def row(way, seed, losses, sent=4_000_000, steps_per_s=2.0):
    curve = [(10 * index, 5.0 * index, loss) for index, loss in enumerate(losses, start=1)]
    return {
        "way": way,
        "seed": seed,
        "loss": losses[-1],
        "curve": curve,
        "steps_per_s": steps_per_s,
        "sent_nbytes": sent,
    }


def test_losses_are_compared_with_ddp_seed_by_seed(bench, capsys):
    rows = [row("DDP", 0, [3, 2.5, 2.0]), row("DDP", 1, [3, 2.5, 2.25])]
    rows += [row("late", 0, [3, 2.25, 2.0625], sent=1_000_000), row("late", 1, [3, 2.75, 2.5], sent=1_000_000)]
    bench.print_rows("20mbit", rows)
    _, link, columns, ddp, late = capsys.readouterr().out.splitlines()
    assert link == "20mbit" and columns.split()[:2] == ["way", "loss"]
    # Two thirds of DDP's looks end at the third, whose losses the second seed of the other way does not reach.
    assert ddp.split() == ["DDP", "2.1250", "+0.0000", "+0.0000", "+0.0000", "2.00", "4.00", "15.0"]
    assert late.split() == ["late", "2.2812", "+0.1562", "+0.0625", "+0.2500", "2.00", "1.00", "–"]


def test_losses_after_finetuning_have_columns_of_their_own(bench, capsys):
    rows = [row("DDP", seed, [3, 2]) | {"finetuned": 1.5 + seed, "forgot": 2.5} for seed in range(2)]
    bench.print_rows("20mbit", rows)
    *_, columns, ddp = capsys.readouterr().out.splitlines()
    assert columns.split()[-2:] == ["finetuned", "forgot"] and ddp.split()[-2:] == ["2.0000", "2.5000"]


def test_a_loss_that_is_never_reached_has_no_time(bench):
    assert bench.seconds_to(2.0, [(10, 1.0, 2.5), (20, 2.0, 2.0)]) == 2.0
    assert bench.seconds_to(1.0, [(10, 1.0, 2.5)]) is None
