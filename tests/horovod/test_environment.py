"""Each variable has its effect; impossible values are errors that name the variable; ignored ones are said."""

import re

import pytest

from fusedcomm.horovod import environment


def test_defaults_are_horovods_but_for_smaller_buckets():
    found = environment.settings()
    assert (found.fusion_nbytes, found.stall_warning_s, found.stall_shutdown_s) == (25 << 20, 60, 0)
    assert found.timeout_s == 30 and not found.dynamic_process_sets


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64M", "whole number"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "whole number"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon", "seconds"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "nan", "seconds"),
        ("HOROVOD_DYNAMIC_PROCESS_SETS", "perhaps", "1 or 0"),
    ],
)
def test_impossible_values_are_errors_that_name_the_variable(monkeypatch, name, value, hint):
    monkeypatch.setenv(name, value)
    assert re.match(f"{name}='{value}' is not possible: use .*{hint}", str(environment.settings().problem))


def test_a_disabled_stall_check_neither_warns_nor_ends_the_job(monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "5")
    found = environment.settings()
    assert (found.stall_warning_s, found.stall_shutdown_s) == (0, 0)


def test_variables_without_effect_are_said_if_they_are_set():
    said = environment.without_effect({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_CACHE_CAPACITY": "1024", "PATH": "x"})
    assert said.startswith("HOROVOD_CYCLE_TIME=5 has no effect: ") and "CACHE" not in said
    assert environment.without_effect({}) == ""


def test_autotune_says_once_what_to_set_instead():
    said = environment.without_effect({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv"})
    assert said.startswith("HOROVOD_AUTOTUNE=1, HOROVOD_AUTOTUNE_LOG=log.csv have no effect: ")
    assert said.count("set HOROVOD_FUSION_THRESHOLD") == 1
