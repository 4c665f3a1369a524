"""A Llama of 1.1 billion parameters on text and code. Not run here.

python -m jaxdl.data prepare --config configs/lm_llama_1b.py
python -m jaxdl.train --config configs/lm_llama_1b.py --workdir runs/lm_llama_1b

Source: TinyLlama (Zhang et al., arXiv 2401.02385; github.com/jzhang38/TinyLlama): 22 layers of 2,048, 32 heads and 4
of keys, MLPs of 5,632; 1,430,512 steps of 2,097,152 tokens in windows of 2,048; AdamW at 0.0004 with 2,000 steps of
warm-up and a cosine to a tenth, weight decay 0.1, gradients clipped at norm 1; seven parts of SlimPajama to three of
StarCoderData. The first 50,000 steps are 105 billion tokens: --max-steps 50000. For the shape of Llama 3.2 1B add
--model llama3.2-1b --model.remat dots.

Data: cerebras/SlimPajama-627B without its GitHub part in data/slimpajama, bigcode/starcoderdata in data/starcoderdata,
the tokenizer.model of Llama 2 in data.

Expected: HellaSwag 0.435 (acc_norm) after 50,000 steps (EVAL.md there).

Small, on a CPU: --config configs/lm_llama_1b.py:smoke
"""

from lm_common import MESH, small

from jaxdl.data import Documents, Mixture
from jaxdl.models import Transformer
from jaxdl.optim import AdamW, Cosine
from jaxdl.parallel.precision import BFloat16
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import LanguageModelling


def documents(folder: str, glob: str, column: str) -> Documents:
    """One of the two sources, as windows of 2,048 tokens."""
    return Documents(
        paths=(f"data/{folder}",),
        glob=glob,
        column=column,
        tokenizer="data/tokenizer.model",
        length=2048,
        packing=False,
        test_fraction=0.0001,
    )


def config() -> Experiment:
    """The experiment."""
    sources = {
        "slimpajama": documents("slimpajama", "**/*.jsonl.zst", "text"),
        "starcoder": documents("starcoderdata", "**/*.parquet", "content"),
    }
    return Experiment(
        model=Transformer(
            num_layers=22,
            embed_dim=2048,
            num_heads=32,
            num_kv_heads=4,
            mlp_dim=5632,
            tied_embeddings=False,
            remat="dots",
        ),
        data=Mixture(sources=sources, weights={"slimpajama": 0.7, "starcoder": 0.3}),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=4e-4, b2=0.95, weight_decay=0.1),
        schedule=Cosine(warmup_steps=2000, end_fraction=0.1),
        precision=BFloat16(),
        batch_size=1024,
        steps=1_430_512,
        step=StepConfig(clip_norm=1.0, microbatches=8),
        evaluation=EvaluationConfig(every_steps=5000, batch_size=128),
        checkpoint=CheckpointConfig(every_steps=1000),
        mesh=MESH,
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
