"""Shared by the tests of kinds from outside jaxdl: a config file that defines one of each part."""

import sys

from jaxdl.core import kinds

MINE = '''
import jaxdl
import optax
import pydantic
from jaxdl import Data, Experiment, Model, Optimizer, Schedule
from jaxdl.exchange import Dense
from jaxdl.models import ResNet
from jaxdl.parallel.precision import Precision
from jaxdl.training.tasks import Classification

class MyModel(Model):
    """A model of the user."""
    hidden: int = pydantic.Field(default=32, ge=1)
    """Hidden units."""
    def build(self):
        return "the network"

class MyRows(Data):
    num_rows: int = 5
    def build(self):
        return "the rows"

class MyTask(Classification):
    extra: float = 0.5

class MyOptimizer(Optimizer, kind="mine"):
    decay: float = 0.0
    def build(self, axes):
        return optax.identity()

class MySchedule(Schedule):
    late: float = 1.0

class MyExchange(Dense):
    loud: bool = False

class MyPrecision(Precision):
    exact: bool = True

def config():
    return Experiment(data=MyRows(num_rows=7), steps=3)
'''


def write_mine(folder):
    """The config file in a folder."""
    path = folder / "mine.py"
    path.write_text(MINE)
    return path


def forget(path):
    """As if in a new process, which has not loaded the file."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jaxdl_config_") or getattr(module, "__file__", None) == str(path):
            del sys.modules[name]
    for known in (*kinds._by_name.values(), kinds._by_source):
        for name in [name for name, cls in known.items() if kinds.source_of(cls)]:
            del known[name]


def moved_to(folder, path):
    folder.mkdir()
    return path.rename(folder / path.name)
