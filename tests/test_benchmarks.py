"""The measurements: which ones the package has, and where those are that only a checkout has."""

import importlib.util

import pytest

from benchmarks import __main__ as listing
from jaxdl.core.errors import OptionError
from jaxdl.performance.bench import train
from jaxdl.performance.bench.__main__ import BENCHES, MOVED, main


def test_the_package_has_the_measurements_of_users():
    assert set(BENCHES) == {
        "balance", "cluster", "exchange", "generate", "input", "memory", "select", "step", "train",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "module"), MOVED.items())
def test_an_earlier_name_says_where_the_measurement_is(name, module, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.endswith(f"python -m benchmarks.{module}.\n")
    assert told.count("\n") == 1
    assert importlib.util.find_spec(f"benchmarks.{module}")


def test_what_is_in_a_checkout_is_listed(capsys):
    listing.main()
    listed = capsys.readouterr().out
    assert not [module for module in MOVED.values() if f"python -m benchmarks.{module}\n" not in listed]


def test_another_framework_is_in_a_checkout():
    with pytest.raises(OptionError, match=r"--against torchy: .* benchmarks\.train has torch"):
        train.parse_command(["--config", "configs/digits.py", "--against", "torchy"])
