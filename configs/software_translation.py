"""A small encoder-decoder that translates messages of free software from English to German: 42,091 real pairs.

python -m jaxdl.data tokenizer translation/train.en-de.tsv --vocab-size 4000 --out software.json
python -m jaxdl.train --config configs/software_translation.py --data.folder translation --workdir runs/translation
python -m jaxdl.translate --workdir runs/translation --split test

The pairs are not part of jaxdl: three TSV files of an English text, a tab, and its German translation, in a folder.

Expect: BLEU 42 on the test pairs with 4 beams. Time: 40 minutes on 2 CPU cores beside other work.

Source: the base model of Vaswani et al. 2017 ("Attention is all you need", label smoothing 0.1, Adam with b2 0.98),
smaller, with the norms before the parts (Xiong et al. 2020) and a vocabulary of few thousand tokens, as small data want
it (Sennrich and Zhang 2019, arXiv 1905.11901).

Small, on a CPU, without the pairs: --config configs/software_translation.py:smoke
"""

from jaxdl.data import Pairs, SyntheticPairs
from jaxdl.models import EncoderDecoder
from jaxdl.optim import AdamW, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Translation


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        data=Pairs(
            folder="translation",
            train=("train.en-de.tsv",),
            valid=("valid.en-de.tsv",),
            test=("test.en-de.tsv",),
            tokenizer="software.json",
            source_length=96,
            target_length=112,
        ),
        model=EncoderDecoder(
            num_encoder_layers=3, num_decoder_layers=3, embed_dim=192, num_heads=3, norm_position="pre", dropout=0.1
        ),
        task=Translation(label_smoothing=0.1),
        optimizer=AdamW(learning_rate=2e-3, b2=0.98, weight_decay=0.01),
        schedule=Cosine(warmup_steps=200),
        step=StepConfig(clip_norm=1.0),
        batch_size=16,
        epochs=9,
        evaluation=EvaluationConfig(every_epochs=1, batch_size=32),
        checkpoint=CheckpointConfig(every_epochs=1, keep=5),
        report=ReportConfig(every_steps=50),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=1)),
    )


def smoke() -> Experiment:
    """Small, on a CPU, on bytes of made-up pairs: it tests that the parts fit together, not BLEU."""
    return config().replaced(
        {
            "data": SyntheticPairs(),
            "model.num_encoder_layers": 1,
            "model.num_decoder_layers": 1,
            "model.embed_dim": 32,
            "model.num_heads": 2,
            "epochs": None,
            "steps": 20,
            "schedule.warmup_steps": 5,
            "evaluation": EvaluationConfig(every_steps=20),
            "checkpoint": CheckpointConfig(every_steps=20),
        }
    )
