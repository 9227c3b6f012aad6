"""Defaults of the variables, and what is said about those that have no effect. tests/refusals has impossible values."""

from fusedcomm.horovod import environment


def test_defaults_are_horovods_but_for_smaller_buckets_and_a_disabled_stall_check_does_nothing(monkeypatch):
    found = environment.settings()
    assert (found.fusion_nbytes, found.stall_warning_s, found.stall_shutdown_s) == (25 << 20, 60, 0)
    assert found.timeout_s == 30 and not found.dynamic_process_sets
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "5")
    found = environment.settings()
    assert (found.stall_warning_s, found.stall_shutdown_s) == (0, 0)


def test_variables_without_effect_are_said_once_if_they_are_set():
    said = environment.without_effect({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_SIZE": "2", "PATH": "x"})
    assert said.startswith("HOROVOD_CYCLE_TIME has no effect")
    said = environment.without_effect({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv"})
    assert said.startswith("HOROVOD_AUTOTUNE, HOROVOD_AUTOTUNE_LOG have no effect")
    assert environment.without_effect({"HOROVOD_SIZE": "2"}) == ""
