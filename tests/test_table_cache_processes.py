"""Tables that the hosts of two processes hold: the bits of tables that the devices hold whole, also over a resume."""

import numpy as np
import pytest
from runs import finish, write_config
from test_processes import start_pair

import jaxdl
from jaxdl.data import Clicks
from jaxdl.embedding import EmbeddingConfig
from jaxdl.evaluation import EvaluationConfig
from jaxdl.experiment import Experiment
from jaxdl.mesh import MeshConfig
from jaxdl.models import DLRM
from jaxdl.optim import SGD, Constant
from jaxdl.report import ReportConfig
from jaxdl.tasks import Binary

CACHE = ("--embedding.cache.fraction", "0.15", "--embedding.cache.min-rows", "1000", "--embedding.cache.window", "3")
EXPERIMENT = Experiment(
    model=DLRM(columns=8, bottom=(8,), top=(8,)),
    data=Clicks(rows=(5000, 3000, 2000, 50), num_ids=(2, 1, 3, 1), train_examples=3000, test_examples=96),
    task=Binary(),
    optimizer=SGD(learning_rate=0.1, momentum=0.9),
    schedule=Constant(),
    batch_size=32,
    steps=10,
    embedding=EmbeddingConfig(),
    mesh=MeshConfig(replica=2, fsdp=2, cpu_devices=2),
    evaluation=EvaluationConfig(every_steps=5, batch_size=48),
    checkpoint={"every_steps": 5},
    report=ReportConfig(every_steps=1, tensorboard=False, curves=False),
)


@pytest.mark.long("two processes train three times")
def test_two_hosts_hold_tables_bit_equal(tmp_path):
    config = write_config(tmp_path, EXPERIMENT)

    def trained(name, *args):
        ended = [finish(process) for process in start_pair(config, tmp_path / name, *args)]
        assert [code for code, _ in ended] == [0, 0], ended

    trained("whole")
    trained("cached", *CACHE, "--max-steps", "6")
    trained("cached", *CACHE)
    whole, cached = (jaxdl.restore(tmp_path / name) for name in ("whole", "cached"))
    for name, expected in whole.model_state["tables"].items():
        found = cached.model_state["tables"][name]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), err_msg=name)
