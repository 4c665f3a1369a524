"""Mixed integer programs are solved without a word on stdout, where HiGHS prints one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse

from jaxdl.core.solver import milp

GAINS = [
    0.9, 3.2369999999999997, 4, 7.173638399741447, 0, 1, 0, 2.6, 4, 0, 1, 7, 4, 2, 1.5392853465142622, 2, 5, 1, 2, 2.5,
    2, 0, 1.8, 0, 4, 4, 4, 1, 1.2456666666666667, 1, 1, 0, 4, 2, 4, 2.1, 1, 1.2, 0, 2, 2,
]  # fmt: skip
MOST = {4: 8, 6: 4, 9: 2, 21: 2, 23: 2, 31: 2, 38: 8}
HOSTS = [{2: -4, 3: -8, 4: 1}, {5: -4, 6: 1}, {7: -1, 8: -2, 9: 1}, {19: -1, 20: -2, 21: 1}, {22: -1, 23: 1}]
HOSTS += [{29: -1, 30: -2, 31: 1}, {36: -1, 37: -4, 38: 1}]
ONE_OF = [{1, 2, 3}, {10}, {11}, {26}, {28, 29, 30}, {34, 35}, {36, 37}]
NEEDS = {
    0: 4, 1: 8, 4: 8, 6: 1, 9: 4, 10: 2, 11: 64, 12: 16, 13: 8, 14: 16, 15: 8, 16: 1, 17: 8, 18: 16, 21: 4, 23: 2,
    24: 4, 25: 8, 26: 32, 27: 4, 28: 4, 31: 4, 32: 16, 33: 16, 34: 16, 38: 8, 39: 4, 40: 16,
}  # fmt: skip


def program():
    """(costs, the other arguments) of what is left of a decision of `fleet simulate --mixed`."""
    rows = [*HOSTS, *(dict.fromkeys(one, 1) for one in ONE_OF), {at: amount / 64 for at, amount in NEEDS.items()}]
    matrix = np.zeros((len(rows), len(GAINS)))
    for number, row in enumerate(rows):
        matrix[number, list(row)] = list(row.values())
    low = [0.0] * len(HOSTS) + [1.0] * len(ONE_OF) + [-np.inf]
    high = [0.0] * len(HOSTS) + [1.0] * len(ONE_OF) + [5.0]
    return -np.array(GAINS), {
        "constraints": scipy.optimize.LinearConstraint(scipy.sparse.csr_array(matrix), low, high),
        "integrality": np.ones(len(GAINS)),
        "bounds": scipy.optimize.Bounds(0, [MOST.get(at, 1) for at in range(len(GAINS))]),
        "options": {"mip_rel_gap": 0.0},
    }


def said_by(call):
    """What a process prints that solves the program and prints two lines besides."""
    code = (
        "import os, scipy.optimize, test_solver, jaxdl.core.solver\n"
        "costs, options = test_solver.program()\n"
        "print('before')\n"
        f"{call}(costs, **options)\n"
        "print('after')"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_what_highs_prints_is_removed():
    plain = said_by("scipy.optimize.milp")
    if len(plain) == 2:
        pytest.skip("this version of HiGHS prints nothing of this program")
    assert any(line.startswith("HighsMipSolverData::") for line in plain)
    assert said_by("jaxdl.core.solver.milp") == ["before", "after"]


def test_the_solution_is_that_of_scipy():
    costs, options = program()
    plain, found = scipy.optimize.milp(costs, **options), milp(costs, **options)
    assert (found.status, found.fun, found.x.tolist()) == (plain.status, plain.fun, plain.x.tolist())


def test_other_output_stays(capfd, monkeypatch):
    def solves(costs):
        os.write(1, b"HighsMipSolverData::all of this\nof another thread\n")
        return costs

    monkeypatch.setattr(scipy.optimize, "milp", solves)
    assert milp(7) == 7
    assert capfd.readouterr().out == "of another thread\n"


@pytest.mark.slow
def test_a_process_without_stdout_solves_too():
    code = "import test_solver, jaxdl.core.solver as s\nc, o = test_solver.program()\nassert s.milp(c, **o).status == 0"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    words = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


def test_an_error_leaves_stdout_as_it_was(capfd):
    with pytest.raises(ValueError):
        milp(np.array([1.0]), bounds=scipy.optimize.Bounds(0, [1, 2, 3]))
    print("still here")
    assert capfd.readouterr().out == "still here\n"
