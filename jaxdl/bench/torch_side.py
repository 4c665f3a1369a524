"""The same ResNet in PyTorch, for `bench train --against torch`: channels-last, mixed precision, `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxdl.config import ConfigError
from jaxdl.experiment import Experiment
from jaxdl.models import ResNet
from jaxdl.optim import LARS, SGD

_EXPANSION = 4


def make_torch_step(
    experiment: Experiment, *, num_classes: int, size: int, channels: int
) -> tuple[Callable[[int], None], str]:
    """A function that runs this many training steps on resident data and waits for their end, and its description.

    Micro-batches, clipping, weight decay and the average of the parameters are the experiment's. The optimizer is SGD
    with momentum even if the experiment's is LARS, which PyTorch lacks. The model is torchvision's if that is
    installed, else a transcription. On GPUs it is compiled, on CPUs it runs eagerly.
    Raises ConfigError for experiments that cannot be compared.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise ConfigError(f"--against torch: PyTorch cannot be loaded here ({error}). pip install torch.") from None
    _check(experiment)
    model_config = experiment.model
    assert isinstance(model_config, ResNet)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(experiment.precision.kind)
    torch.backends.cuda.matmul.allow_tf32 = experiment.precision.kind == "tensorfloat32"
    torch.backends.cudnn.allow_tf32 = experiment.precision.kind == "tensorfloat32"
    torch.backends.cudnn.benchmark = True
    model, origin = _model(model_config, num_classes, channels)
    model = model.to(device=device, memory_format=torch.channels_last)  # pyright: ignore
    optimizer = _optimizer(experiment, model)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    image = torch.randn(experiment.batch_size, channels, size, size, device=device).to(
        memory_format=torch.channels_last
    )
    label = torch.randint(num_classes, (experiment.batch_size,), device=device)
    smoothing = getattr(experiment.task, "label_smoothing", 0.0)
    forward = torch.compile(model) if device == "cuda" else model
    step, params = experiment.step, list(model.parameters())
    average = [one.detach().clone() for one in params] if step.ema_decay is not None else []

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            for part, answer in zip(image.chunk(step.microbatches), label.chunk(step.microbatches), strict=True):
                with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                    loss = torch.nn.functional.cross_entropy(forward(part), answer, label_smoothing=smoothing)
                scaler.scale(loss / step.microbatches).backward()
            if step.clip_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, step.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            if step.ema_decay is not None:
                torch._foreach_lerp_(average, [one.detach() for one in params], 1 - step.ema_decay)
        if device == "cuda":
            torch.cuda.synchronize()
        else:
            float(params[0].detach().ravel()[0])

    how = "compiled" if device == "cuda" else "not compiled"
    return steps, f"PyTorch {torch.__version__}, {origin}, SGD with momentum, channels-last, {how}, {device}"


def _check(experiment: Experiment) -> None:
    """Raises ConfigError for experiments that the PyTorch side does not support."""
    config, kind, task = experiment.model, experiment.optimizer.kind, experiment.task
    if not (
        isinstance(config, ResNet)
        and config.norm == "batch"
        and len(config.blocks) == 4
        and config.stem in (None, "imagenet")
    ):
        raise ConfigError(
            "--against torch: only ResNet-18 to 152 with batch norm and the imagenet stem are supported. "
            "Measure another model without --against."
        )
    if not isinstance(experiment.optimizer, SGD | LARS):
        raise ConfigError(f"--against torch: the optimizer is {kind}; PyTorch's side has SGD, in place of LARS too.")
    if getattr(task, "mixup", 0) or getattr(task, "cutmix", 0):
        raise ConfigError("--against torch: PyTorch's side mixes no images. Add --task.mixup 0 --task.cutmix 0.")


def _optimizer(experiment: Experiment, model: Any) -> Any:
    """The experiment's SGD, or the nearest equivalent of its LARS in PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    config = experiment.optimizer
    assert isinstance(config, SGD | LARS)
    momentum = max(config.momentum, config.momentum_at_peak or 0)
    groups = [
        {
            "params": [one for one in model.parameters() if (one.ndim > 1 or not config.exclude_vectors) == decays],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return torch.optim.SGD(groups, lr=1e-3, momentum=momentum, nesterov=config.nesterov)


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
            self.layers = nn.ModuleList([conv_norm(*one) for one in sizes])
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
