"""The suite's budget: what fails a run, and whether the files' budgets fit into that of the whole."""

from pathlib import Path
from types import SimpleNamespace

import budget
import pytest
from budget import BUDGETS, DEFAULT_SEC, LONG_SEC, ROOM, WHOLE_SEC, Budget


def exit_code(selected, *cpu_sec, reason=""):
    """The exit code of a run whose tests passed and took this long."""
    plugin, session = Budget(selected), SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    for number, seconds in enumerate(cpu_sec):
        nodeid = f"tests/test_{number % 3}.py::test_{number}"
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, cpu_sec=seconds, long_reason=reason))
    plugin.pytest_sessionfinish(session)
    return session.exitstatus


def test_a_whole_over_its_budget_by_a_fifth_fails_the_run(monkeypatch):
    monkeypatch.setattr(budget, "WHOLE_SEC", {"not slow": 20.0, "": 50.0})
    assert (exit_code("not slow", 11, 12), exit_code("not slow", 11, 14)) == (0, 1)
    assert (exit_code("", 29, 30), exit_code("", 29, 32)) == (0, 1)
    assert exit_code("slow", 59, 59) == 0, "there is no budget for the slow tests alone"


def test_a_long_test_needs_a_reason():
    assert exit_code("", LONG_SEC + 1) == 1
    assert exit_code("", LONG_SEC + 1, reason="trains to the end") == 0


def test_the_budgets_of_the_files_fit_into_that_of_the_whole():
    """Each has some room for a machine that is busy."""
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert not BUDGETS.keys() - files, "files that are no more"
    assert sum(BUDGETS.get(name, DEFAULT_SEC) for name in files) <= ROOM * WHOLE_SEC[""]
