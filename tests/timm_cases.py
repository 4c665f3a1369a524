"""Image networks of timm and torchvision, with weights from a seed. `scripts/record_timm_logits.py` recorded theirs."""

import json
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).parent / "timm_logits.json"
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.5, 0.2)
_TINY = {"patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 5}
_TIMM_VIT = "timm.models.vision_transformer.VisionTransformer"
CASES = {
    "resnet18": ("torchvision.models.resnet18", {"num_classes": 5}, 64),
    "resnet50": ("timm.models.resnet.resnet50", {"num_classes": 5}, 64),
    "vit_token": (_TIMM_VIT, {**_TINY, "img_size": 32}, 32),
    "vit_other_size": (_TIMM_VIT, {**_TINY, "img_size": 32}, 48),
    "vit_mean_first": (_TIMM_VIT, {**_TINY, "img_size": 32, "global_pool": "avg"}, 32),
    "vit_mean": (
        _TIMM_VIT, {**_TINY, "img_size": 32, "global_pool": "avg", "class_token": False, "fc_norm": False}, 32,
    ),
    "vit_scaled": (_TIMM_VIT, {**_TINY, "img_size": 32, "init_values": 1.0, "no_embed_class": True}, 32),
    "torchvision_vit": (
        "torchvision.models.vision_transformer.VisionTransformer",
        {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768,
         "num_classes": 5},
        32,
    ),
}  # fmt: skip
"""Case -> (the class there, its arguments, height and width of the images)."""


def recorded():
    """Case -> {"shapes": name of each tensor -> its shape, "logits": those of `images`}."""
    return json.loads(RECORDED.read_text())


def images(size):
    """Two images, uint8 [2, size, size, 3], smooth and rough."""
    rng = np.random.default_rng(5)
    coarse = np.kron(rng.integers(0, 256, (2, 8, 8, 3)), np.ones((1, size // 8, size // 8, 1)))
    return np.clip(coarse + rng.normal(size=coarse.shape) * 20, 0, 255).astype(np.uint8)


def weights(shapes):
    """Tensors of these shapes, float32; the counts of batch norm are int64."""
    rng, made = np.random.default_rng(3), {}
    for name in sorted(shapes):
        shape = shapes[name]
        noise = rng.normal(size=shape).astype(np.float32)
        if name.endswith("num_batches_tracked"):
            made[name] = np.zeros(shape, np.int64)
        elif name.endswith("running_var"):
            made[name] = np.exp(0.3 * noise)
        elif len(shape) == 1:
            made[name] = noise * 0.1 + (name.endswith(("weight", "gamma")))
        else:
            made[name] = noise / np.float32(np.sqrt(np.prod(shape[1:])) if "pos" not in name else 2)
    return made
