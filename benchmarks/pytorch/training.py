"""The same ResNet or decoder in PyTorch, for `benchmarks.train --against torch`: mixed precision, `torch.compile`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.pytorch import load_torch
from benchmarks.pytorch.decoder import decoder, in_fp8, set_params
from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec, ImageSpec, TextSpec
from jaxdl.models import ResNet, Transformer
from jaxdl.optim import LARS, SGD, AdamW
from jaxdl.training.experiment import Experiment

_EXPANSION = 4
_RATE = 1e-3
"""The learning rate of steps that are only timed."""
Side = tuple[Any, Callable[..., Any], Sequence[Any], str]
"""A model, the loss of a batch, the batch, and a description."""


def make_torch_step(experiment: Experiment, spec: DataSpec) -> tuple[Callable[[int], None], str]:
    """A function that runs this many training steps on resident data and waits for their end, and its description.

    Micro-batches, clipping, weight decay and the average of the parameters are the experiment's. A ResNet is
    torchvision's if that is installed, else a transcription, and its optimizer is SGD with momentum even if the
    experiment's is LARS, which PyTorch lacks. A decoder is a transcription, with PyTorch's own attention and AdamW.
    On GPUs model and loss are compiled, on CPUs they run eagerly.
    Raises ConfigError for experiments that cannot be compared.
    """
    torch = load_torch()
    _check(experiment)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = _resnet(experiment, spec, device) if isinstance(spec, ImageSpec) else _decoder(experiment, spec, device)
    model, _, batch, about = side
    step = _step(experiment, side, compiled=device == "cuda")

    def steps(number: int) -> None:
        for _ in range(number):
            step(batch)
        _wait(model)

    begun = time.monotonic()
    steps(1)
    how = "compiled" if device == "cuda" else "not compiled"
    how += f", first step {time.monotonic() - begun:.1f} s"
    if device == "cuda":
        how += f", {torch.cuda.max_memory_allocated() / 1e9:.2f} GB at most in use"
    return steps, f"PyTorch {torch.__version__}, {about}, {how}, {device}"


def first_losses(
    experiment: Experiment, spec: TextSpec, params: Mapping[str, Any], tokens: np.ndarray, rates: Sequence[float]
) -> list[float]:
    """The losses of steps of the decoder with these learning rates, each on the same tokens [batch, length + 1].

    It begins with jaxdl's parameters, and is not compiled. Raises ConfigError as `make_torch_step`.
    """
    torch = load_torch()
    _check(experiment)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = _decoder(experiment, spec, device)
    set_params(side[0], params)
    step = _step(experiment, side, compiled=False)
    batch = (torch.tensor(tokens, device=device, dtype=torch.int64),)
    return [float(step(batch, rate)) for rate in rates]


def _step(experiment: Experiment, side: Side, *, compiled: bool) -> Callable[..., Any]:
    """A function that makes a training step on a batch with a learning rate, and returns its loss."""
    import torch  # pyright: ignore[reportMissingImports]

    model, loss_of, _, _ = side
    kind, device = experiment.precision.kind, next(model.parameters()).device.type
    dtype = {"bfloat16": torch.bfloat16, "fp8": torch.bfloat16, "float16": torch.float16}.get(kind)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tensorfloat32"
    torch.backends.cudnn.allow_tf32 = kind == "tensorfloat32"
    torch.backends.cudnn.benchmark = True
    optimizer = _optimizer(experiment, model)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    forward = torch.compile(loss_of) if compiled else loss_of
    config, params = experiment.step, list(model.parameters())
    average = [param.detach().clone() for param in params] if config.ema_decay is not None else []

    def step(batch: Sequence[Any], rate: float = _RATE) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for parts in zip(*(tensor.chunk(config.microbatches) for tensor in batch), strict=True):
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = forward(*parts)
            total = total + loss.detach() / config.microbatches
            scaler.scale(loss / config.microbatches).backward()
        if config.clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, config.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        if config.ema_decay is not None:
            torch._foreach_lerp_(average, [param.detach() for param in params], 1 - config.ema_decay)
        return total

    return step


def _wait(model: Any) -> None:
    """Returns when the steps so far have ended."""
    import torch  # pyright: ignore[reportMissingImports]

    param = next(model.parameters())
    if param.is_cuda:
        torch.cuda.synchronize()
    else:
        float(param.detach().ravel()[0])


def _check(experiment: Experiment) -> None:
    """Raises ConfigError for experiments that the PyTorch side does not support."""
    config, kind, task = experiment.model, experiment.optimizer.kind, experiment.task
    known = (
        isinstance(config, ResNet)
        and config.norm == "batch"
        and len(config.blocks) == 4
        and config.stem in (None, "imagenet")
    )
    if not known and not isinstance(config, Transformer):
        raise ConfigError(
            "--against torch: only ResNet-18 to 152 with batch norm and the imagenet stem, and the transformer, are "
            "supported. Measure another model without --against."
        )
    if not isinstance(experiment.optimizer, SGD | LARS if known else AdamW):
        supported = "SGD, in place of LARS too" if known else "AdamW"
        raise ConfigError(f"--against torch: the optimizer is {kind}; PyTorch's side of this model has {supported}.")
    for name in ("window", "dropout", "attention_dropout"):
        if getattr(config, name, None):
            raise ConfigError(
                f"--against torch: PyTorch's side has no {name}. Measure without it, or without --against."
            )
    if getattr(task, "mixup", 0) or getattr(task, "cutmix", 0):
        raise ConfigError("--against torch: PyTorch's side mixes no images. Add --task.mixup 0 --task.cutmix 0.")
    if getattr(task, "z_loss", 0):
        raise ConfigError("--against torch: PyTorch's side has no z-loss. Add --task.z-loss 0.")


def _optimizer(experiment: Experiment, model: Any) -> Any:
    """The experiment's optimizer, or the nearest equivalent of its LARS in PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    config = experiment.optimizer
    assert isinstance(config, SGD | LARS | AdamW)
    groups = [
        {
            "params": [
                parameter
                for parameter in model.parameters()
                if (parameter.ndim > 1 or not config.exclude_vectors) == decays
            ],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    if isinstance(config, AdamW):
        betas, fused = (config.b1, config.b2), next(model.parameters()).is_cuda
        return torch.optim.AdamW(groups, lr=_RATE, betas=betas, eps=config.epsilon, fused=fused)
    momentum = max(config.momentum, config.momentum_at_peak or 0)
    return torch.optim.SGD(groups, lr=_RATE, momentum=momentum, nesterov=config.nesterov)


def _resnet(experiment: Experiment, spec: ImageSpec, device: str) -> Side:
    import torch  # pyright: ignore[reportMissingImports]

    config, count = experiment.model, experiment.batch_size
    assert isinstance(config, ResNet)
    model, origin = _model(config, spec.num_classes, spec.channels)
    model = model.to(device=device, memory_format=torch.channels_last)  # pyright: ignore
    image = torch.randn(count, spec.channels, spec.height, spec.width, device=device)
    label = torch.randint(spec.num_classes, (count,), device=device)
    smoothing = getattr(experiment.task, "label_smoothing", 0.0)

    def loss_of(image: Any, label: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(image), label, label_smoothing=smoothing)

    batch = (image.to(memory_format=torch.channels_last), label)
    return model, loss_of, batch, f"{origin}, SGD with momentum, channels-last"


def _decoder(experiment: Experiment, spec: DataSpec, device: str) -> Side:
    import torch  # pyright: ignore[reportMissingImports]

    config = experiment.model
    assert isinstance(config, Transformer)
    assert isinstance(spec, TextSpec)
    dtype = getattr(torch, experiment.precision.dtype.name)
    model = decoder(config, spec.vocab_size, dtype).to(device)
    size = experiment.precision.fp8_size
    how = "" if size is None else in_fp8(model, size)
    tokens = torch.randint(spec.vocab_size, (experiment.batch_size, spec.length + 1), device=device)

    def loss_of(tokens: Any) -> Any:
        logits = model(tokens[:, :-1]).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    about = f"a transcription of the decoder, scaled_dot_product_attention, AdamW{how}"
    return model, loss_of, (tokens,), about


def _model(config: ResNet, num_classes: int, channels: int) -> tuple[Any, str]:
    if config.width in (None, 64) and channels == 3:
        try:
            import torchvision  # pyright: ignore[reportMissingImports]

            return getattr(torchvision.models, f"resnet{config.depth}")(num_classes=num_classes), "torchvision's model"
        except (ImportError, RuntimeError):  # Not installed, or not built for this version of PyTorch.
            pass
    return _transcribed(config, num_classes, channels), "a transcription of torchvision's model"


def _transcribed(config: ResNet, num_classes: int, channels: int) -> Any:
    """The layers of torchvision's ResNet, v1.5: the stride of a bottleneck is in its 3x3 convolution."""
    from torch import nn  # pyright: ignore[reportMissingImports]

    def conv_norm(incoming: int, outgoing: int, size: int, stride: int = 1) -> Any:
        conv = nn.Conv2d(incoming, outgoing, size, stride, size // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outgoing))

    class Block(nn.Module):
        def __init__(self, incoming: int, width: int, stride: int) -> None:
            super().__init__()
            if config.is_bottleneck:
                outgoing = width * _EXPANSION
                sizes = [(incoming, width, 1, 1), (width, width, 3, stride), (width, outgoing, 1, 1)]
            else:
                outgoing = width
                sizes = [(incoming, width, 3, stride), (width, width, 3, 1)]
            self.layers = nn.ModuleList([conv_norm(*size) for size in sizes])
            projects = stride != 1 or incoming != outgoing
            self.shortcut = conv_norm(incoming, outgoing, 1, stride) if projects else nn.Identity()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Any) -> Any:
            y = x
            for number, layer in enumerate(self.layers, start=1):
                y = layer(y) if number == len(self.layers) else self.relu(layer(y))
            return self.relu(y + self.shortcut(x))

    width = config.width or 64
    layers: list[Any] = [conv_norm(channels, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    incoming = width
    for stage, count in enumerate(config.blocks):
        for block in range(count):
            layers.append(Block(incoming, width * 2**stage, 2 if stage and not block else 1))
            incoming = width * 2**stage * (_EXPANSION if config.is_bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(incoming, num_classes))
