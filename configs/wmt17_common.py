"""The common part of the WMT configs; it is not an experiment.

They read WMT 2017 of TensorFlow Datasets, prepared as ArrayRecord files in TFDS_DATA_DIR, and wmt17.json, a tokenizer
of 37,000 tokens trained on both languages, as many as the paper has.
"""

from jaxdl.data import SyntheticPairs, TFDSPairs
from jaxdl.models import EncoderDecoder
from jaxdl.optim import AdamW, InverseSqrt, noam_peak
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import BFloat16, Float32
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Translation

WARMUP_STEPS = 4000


def vaswani(model: EncoderDecoder, *, steps: int, keep: int) -> Experiment:
    """A model trained by the recipe of Vaswani et al. 2017, section 5: 96 rows of 256 tokens are about 25,000.

    `keep` checkpoints stay, for their mean.
    """
    return Experiment(
        data=TFDSPairs(name="wmt17_translate/de-en", tokenizer="wmt17.json", source_length=256, target_length=256),
        model=model,
        task=Translation(label_smoothing=0.1),
        optimizer=AdamW(
            learning_rate=noam_peak(model.embed_dim, WARMUP_STEPS), b1=0.9, b2=0.98, epsilon=1e-9, weight_decay=0.0
        ),
        schedule=InverseSqrt(warmup_steps=WARMUP_STEPS),
        precision=BFloat16(),
        batch_size=96,
        steps=steps,
        evaluation=EvaluationConfig(every_steps=2000),
        checkpoint=CheckpointConfig(every_steps=2000, keep=keep),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=2)),
    )


def small(experiment: Experiment) -> Experiment:
    """The experiment shortened to a minute on a CPU, on bytes of made-up pairs: numbers in English and in German.

    It tests that the parts fit together, not BLEU.
    """
    return experiment.replaced(
        {
            "data": SyntheticPairs(),
            "model.num_encoder_layers": 1,
            "model.num_decoder_layers": 1,
            "model.embed_dim": 32,
            "model.num_heads": 2,
            "precision": Float32(),
            "mesh": MeshConfig(cpu_devices=2),
            "batch_size": 16,
            "steps": 20,
            "schedule.warmup_steps": 5,
            "evaluation.every_steps": 20,
            "checkpoint.every_steps": 20,
        }
    )
