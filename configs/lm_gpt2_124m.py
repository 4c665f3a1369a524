"""GPT-2 124M on 10 billion tokens of FineWeb. Not run here.

python -m jaxdl.data prepare --config configs/lm_gpt2_124m.py
python -m jaxdl.train --config configs/lm_gpt2_124m.py --workdir runs/lm_gpt2_124m

Source: llm.c, scripts/run_gpt2_124M.sh (A. Karpathy), with the rate and the batch of GPT-3 Small (Brown et al., arXiv
2005.14165, table 2.1): 18,865 steps of 524,288 tokens in windows of 1,024, AdamW at 0.0006 with 700 steps of warm-up
and a cosine to 0, weight decay 0.1 on matrices, gradients clipped at norm 1, no dropout. The table has 50,304 rows for
50,257 tokens, as theirs: a multiple of 128, which `tensor` can split.

Data: the files of HuggingFaceFW/fineweb, sample/10BT, in data/fineweb; tokenizer.json and tokenizer_config.json of
openai-community/gpt2 in data/gpt2.

Expected: loss 3.28 on held-out text of FineWeb (README of github.com/KellerJordan/modded-nanogpt, of llm.c's run), and
HellaSwag 0.299, where OpenAI's own weights have 0.294 (github.com/karpathy/llm.c, discussion 481).

Small, on a CPU: --config configs/lm_gpt2_124m.py:smoke
"""

from lm_common import MESH, small

from jaxdl.data import Documents
from jaxdl.models import preset
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
        model=preset("gpt2-124m", dropout=0.0, attention_dropout=0.0, vocab_size=50_304),
        data=Documents(
            paths=("data/fineweb",),
            glob="**/*.parquet",
            tokenizer="data/gpt2",
            length=1024,
            packing=False,
            test_fraction=0.001,
        ),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=6e-4, b2=0.95, weight_decay=0.1),
        schedule=Cosine(warmup_steps=700),
        precision=BFloat16(),
        batch_size=512,
        steps=18_865,
        step=StepConfig(clip_norm=1.0),
        evaluation=EvaluationConfig(every_steps=500, batch_size=256),
        checkpoint=CheckpointConfig(every_steps=1000),
        mesh=MESH,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
