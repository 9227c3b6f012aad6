"""The prediction of bucket_cap_mb from buckets with known times."""

import dataclasses
import json

import pytest

from fusedcomm.autotune.bucket_cap import Bucket, BucketCap, predict

MIB = 1 << 20


def seen(sizes_mib, backward_ms_per_mib, a_ms, wire_ms_per_mib):
    """The buckets of one pass. Gradients appear at a constant rate, and one link sends one bucket after another."""
    buckets, total, free = [], 0.0, float("-inf")
    for size in sizes_mib:
        total += size
        handed = (total - sizes_mib[0]) * backward_ms_per_mib
        free = max(handed, free) + a_ms + size * wire_ms_per_mib
        buckets.append(Bucket(int(size * MIB), handed, free))
    return buckets


def cut(total_mib, cap):
    full, rest = divmod(total_mib, cap)
    return [cap * MIB] * full + ([rest * MIB] if rest else [])


def cuts(total_mib):
    return {cap: cut(total_mib, cap) for cap in (1, 5, 10, 25, 50, 100)}


def test_a_model_that_is_known_is_found_again():
    """Gradients appear twice as fast as they are sent. The exposed time is then the time of all transfers, less the
    time from the first bucket's hand-over to the last's."""
    sizes = [1, 25, 25, 25, 24]
    told = predict([seen(sizes, 1.0, 0.5, 2.0)] * 3, 400.0, cuts(100))
    by_cap = dict(told.exposed_ms)
    # With one bucket nothing overlaps. With many small ones, each adds half a millisecond.
    assert by_cap[100] == pytest.approx(0.5 + 200)
    assert by_cap[50] == pytest.approx(1 + 200 - 50)
    assert by_cap[1] == pytest.approx(50 + 200 - 99)
    assert told.now_ms == pytest.approx(25 + 4 * 0.5 + 198 - 99)  # the link is idle until the second bucket
    assert told.best_mb == 5 and by_cap[5] == pytest.approx(10 + 200 - 95)


def test_small_buckets_are_best_where_a_bucket_costs_nothing_and_large_ones_where_it_costs_much():
    sizes = [1, 25, 25, 25, 24]
    cheap = predict([seen(sizes, 1.0, 0.0, 0.5)], 200.0, cuts(100))
    dear = predict([seen(sizes, 1.0, 60.0, 0.5)], 200.0, cuts(100))
    assert cheap.best_mb == 1 and dear.best_mb >= 50
    assert "predicted" in str(dear) and f"bucket_cap_mb={dear.best_mb})" in str(dear)
    assert "DDP fixes its buckets when it is made" in str(dear)


def test_one_odd_pass_and_one_of_other_buckets_change_nothing():
    good = seen([1, 25, 24], 1.0, 0.5, 2.0)
    odd = [Bucket(b.nbytes, 3 * b.handed_ms, 9 * b.done_ms) for b in good]
    passes = [seen([50], 1.0, 0.5, 2.0), good, odd, good]
    assert predict(passes, 100.0, cuts(50)) == predict([good], 100.0, cuts(50))


def test_what_cannot_be_told_is_said():
    one = predict([seen([50], 1.0, 0.5, 2.0)], 100.0, cuts(50))
    alike = predict([seen([25, 25, 25], 1.0, 0.5, 2.0)], 100.0, cuts(75))
    failed = predict([[Bucket(MIB, 0.0, float("nan")), Bucket(9 * MIB, 1.0, 2.0)]], 100.0, cuts(10))
    nothing = predict([], 100.0, cuts(10))
    unseen = "no backward pass was observed to its end"
    for told, word in ((one, "one bucket"), (alike, "the 3 buckets"), (failed, unseen), (nothing, unseen)):
        assert told.best_mb is None and word in str(told)


def test_what_would_gain_nothing_is_said():
    told = predict([seen([1, 5, 5, 5], 20.0, 0.1, 0.01)], 400.0, {5: cut(16, 5)})
    assert "nothing to gain" in str(told)


def test_fields_come_back():
    told = predict([seen([1, 25, 24], 1.0, 0.5, 2.0)], 100.0, cuts(50))
    assert BucketCap.from_fields(json.loads(json.dumps(dataclasses.asdict(told)))) == told
