"""Defaults of the variables. tests/refusals has impossible values."""

from fusedcomm.horovod import environment


def test_defaults_are_horovods_but_for_smaller_buckets_and_a_disabled_stall_check_does_nothing(monkeypatch):
    found = environment.settings()
    assert (found.fusion_nbytes, found.stall_warning_s, found.stall_shutdown_s) == (25 << 20, 60, 0)
    assert found.timeout_s == 30
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "5")
    found = environment.settings()
    assert (found.stall_warning_s, found.stall_shutdown_s) == (0, 0)
