"""A mixture of 64 experts, 6.9 billion parameters, of which a token uses 1.3: OLMoE-1B-7B. Not run here.

python -m jaxdl.data prepare --config configs/moe_olmoe.py
python -m jaxdl.train --config configs/moe_olmoe.py --workdir runs/moe_olmoe

Source: after OLMoE (Muennighoff et al., arXiv 2409.02060): 16 layers of 2,048, 16 heads, 64 experts of 1,024 in each, 8
a token, 6,919,161,856 parameters; norms of queries and keys; a loss for balance (0.01) and one for the router's logits
(0.001); batches of 1,024 windows of 4,096 tokens, 5.1 trillion in all; AdamW at 0.0004 with 2,500 steps of warm-up and
a cosine to a tenth, weight decay 0.1, gradients clipped at norm 1. The first 25,000 steps are 105 billion tokens:
--max-steps 25000. `python -m jaxdl.convert to-hf` writes the run in the layout `olmoe`.

Data: the files of allenai/OLMoE-mix-0924 in data/olmoe-mix; tokenizer.json and tokenizer_config.json of
allenai/OLMoE-1B-7B-0924 in data/olmoe.

Expected: no figure of a run as short as 25,000 steps is known here.

On 8 x H100 each device has 8 experts of each layer, and all tokens of a micro-batch are gathered there. Compiled for
them a device needs 26.6 GB, 16.2 of it temporary (`python -m benchmarks.experts --config configs/moe_olmoe.py --length
4096`). Several nodes: --mesh.replica NODES.

`eight_of_1b` is a mixture of 8 experts of 1 billion parameters each, 2 a token, to compare ways of computing it.

Small, on a CPU: --config configs/moe_olmoe.py:smoke
"""

from lm_common import MESH, small

from jaxdl.data import Documents
from jaxdl.models import MixtureOfExperts
from jaxdl.optim import AdamW, Cosine
from jaxdl.parallel.precision import BFloat16
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import LanguageModelling


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=MixtureOfExperts(
            num_layers=16,
            embed_dim=2048,
            num_heads=16,
            mlp_dim=1024,
            num_experts=64,
            experts_per_token=8,
            normalized=False,
            qk_norm="all",
            balance="loss",
            balance_rate=0.01,
            router_z_loss=0.001,
            init_stddev=0.02,
            tied_embeddings=False,
            vocab_size=50_304,
            remat="block",
        ),
        data=Documents(
            paths=("data/olmoe-mix",),
            glob="**/*.json.gz",
            tokenizer="data/olmoe",
            length=4096,
            packing=False,
            test_fraction=0.0001,
        ),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=4e-4, b2=0.95, weight_decay=0.1),
        schedule=Cosine(warmup_steps=2500, end_fraction=0.1),
        precision=BFloat16(),
        batch_size=1024,
        steps=1_223_000,
        step=StepConfig(clip_norm=1.0, microbatches=32),
        evaluation=EvaluationConfig(every_steps=5000, batch_size=32),
        checkpoint=CheckpointConfig(every_steps=1000),
        mesh=MESH,
    )


def eight_of_1b() -> Experiment:
    """8 experts of 1 billion parameters (in 16 layers of 10,240), with 16 windows for the 8 devices."""
    model = {"num_experts": 8, "experts_per_token": 2, "mlp_dim": 10_240, "normalized": True, "balance": "bias"}
    changes = {f"model.{name}": value for name, value in model.items()}
    more = {"model.balance_rate": None, "batch_size": 16, "step.microbatches": 1, "evaluation.batch_size": 16}
    return config().replaced(changes | more)


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config()).replaced({"model.num_experts": 8, "model.experts_per_token": 2})
