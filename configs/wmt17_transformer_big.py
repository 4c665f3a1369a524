"""The big model of "Attention is all you need" on WMT 2017, English to German. Not run here.

export TFDS_DATA_DIR=FOLDER
python -c "from jaxdl.data import TFDSPairs; [print(*p, sep=chr(9)) for p in TFDSPairs().pairs('train')]" > wmt17.tsv
python -m jaxdl.data tokenizer wmt17.tsv --vocab-size 37000 --out wmt17.json
python -m jaxdl.data prepare --config configs/wmt17_transformer_big.py
python -m jaxdl.train --config configs/wmt17_transformer_big.py --workdir runs/wmt17_big
python -m jaxdl.translate --workdir runs/wmt17_big --split test --average 20

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 5: 300,000 steps of about 25,000 source and 25,000
target tokens, Adam with b2 0.98 and epsilon 1e-9, 4,000 steps of warm-up and the inverse square root, label smoothing
0.1, dropout 0.3; the mean of the last 20 checkpoints, 4 beams with length penalty 0.6.

Expected: unknown for this data. The paper has BLEU 28.4 on newstest2014 after WMT 2014, in 3.5 days on 8 P100.

Small, on a CPU: --config configs/wmt17_transformer_big.py:smoke
"""

from wmt17_common import small, vaswani

from jaxdl.models import EncoderDecoder
from jaxdl.training.experiment import Experiment


def config() -> Experiment:
    """The experiment."""
    return vaswani(EncoderDecoder(embed_dim=1024, num_heads=16, dropout=0.3), steps=300_000, keep=20)


def smoke() -> Experiment:
    """Small, on a CPU."""
    return small(config())
