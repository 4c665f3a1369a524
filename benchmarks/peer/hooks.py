"""Communication hooks of PyTorch's DDP: those that it has, and some that people write themselves, for Gloo."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch.distributed.algorithms.ddp_comm_hooks import (  # pyright: ignore[reportMissingImports]
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.functional import pad  # pyright: ignore[reportMissingImports]

BLOCK = 512
"""Entries that share a scale, as in PyTorch's `quantization_perchannel_hook`."""


def all_gathered(message: Any) -> tuple[list[Any], Any]:
    """(the messages of all hosts, once the future is done)."""
    messages = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    return messages, dist.all_gather(messages, message, async_op=True).get_future()


@dataclass
class TopK:
    """The largest entries with error feedback, as it is usually written: one all-gather of values and indices.

    Both are one message of 32-bit words. Nothing blocks: DDP goes on with the backward pass.
    """

    density: float
    residuals: dict[int, Any] = field(default_factory=dict)
    """By the number of the bucket."""

    def __call__(self, _: None, bucket: Any) -> Any:
        """The hook."""
        flat = bucket.buffer()
        residual = self.residuals.get(bucket.index())
        if residual is None or residual.numel() != flat.numel():  # DDP has rebuilt its buckets.
            residual = self.residuals[bucket.index()] = torch.zeros_like(flat)
        residual += flat
        k = max(1, math.ceil(self.density * flat.numel()))
        indices = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0
        messages, future = all_gathered(torch.cat([values.view(torch.int32), indices.to(torch.int32)]))

        def combine(_: Any) -> Any:
            flat.zero_()
            for message in messages:
                flat.index_add_(0, message[k:].long(), message[:k].view(torch.float32), alpha=1 / len(messages))
            return flat

        return future.then(combine)


class Int8:
    """8 bits an entry, symmetric, and a float32 scale for each block."""

    def encode(self, x: Any) -> Any:
        """[rows, entries] -> uint8 [rows, bytes]."""
        blocks = x.view(x.shape[0], -1, BLOCK)
        scale = blocks.abs().amax(2, keepdim=True).clamp_min(1e-30) / 127
        values = (blocks / scale).round_().to(torch.int8)
        return torch.cat([part.reshape(x.shape[0], -1).view(torch.uint8) for part in (values, scale)], 1)

    def decode(self, message: Any) -> Any:
        """The inverse."""
        num_blocks = message.shape[1] // (BLOCK + 4)
        values, scale = message.split([num_blocks * BLOCK, num_blocks * 4], 1)
        blocks = values.view(torch.int8).view(-1, num_blocks, BLOCK).float()
        return (blocks * scale.contiguous().view(torch.float32)[..., None]).view(message.shape[0], -1)


class OneBit:
    """The sign of each entry, and a float32 scale for each row."""

    def encode(self, x: Any) -> Any:
        """[rows, entries] -> uint8 [rows, bytes]."""
        bits = torch.from_numpy(np.packbits((x >= 0).numpy(), axis=1))
        scale = (x.norm(dim=1, keepdim=True) / math.sqrt(x.shape[1])).view(torch.uint8)
        return torch.cat([bits, scale], 1)

    def decode(self, message: Any) -> Any:
        """The inverse."""
        bits, scale = message.split([message.shape[1] - 4, 4], 1)
        signs = torch.from_numpy(np.unpackbits(bits.numpy(), axis=1)).float().mul_(2).sub_(1)
        return signs.mul_(scale.contiguous().view(torch.float32))


def int8_all_gather(_: None, bucket: Any) -> Any:
    """What PyTorch's `quantization_perchannel_hook` does, which is for CUDA: all gather the gradients of all."""
    flat, code = bucket.buffer(), Int8()
    messages, future = all_gathered(code.encode(pad(flat, (0, -flat.numel() % BLOCK))[None])[0])

    def combine(_: Any) -> Any:
        total: Any = sum(code.decode(message[None])[0] for message in messages)
        return flat.copy_(total[: flat.numel()]).div_(len(messages))

    return future.then(combine)


@dataclass
class TwoPhase:
    """An all-to-all of encoded gradients; who owns a range encodes its mean again, and all gather these.

    With one bit and error feedback it is `compressed_allreduce` of DeepSpeed's 1-bit Adam, which is for CUDA. For one
    bucket only: with several, hosts could send the second message of one and the first of the next in another order.
    """

    code: Any
    error_feedback: bool
    errors: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Of a bucket: of what was sent, and of the mean that this host owns."""

    def __call__(self, _: None, bucket: Any) -> Any:
        """The hook."""
        flat, world = bucket.buffer(), dist.get_world_size()
        ranges = pad(flat, (0, -flat.numel() % (world * BLOCK))).view(world, -1)
        errors = self.errors.get(bucket.index())
        if self.error_feedback and (errors is None or errors[0].shape != ranges.shape):
            errors = self.errors[bucket.index()] = torch.zeros_like(ranges), torch.zeros_like(ranges[:1])
        message = self._encode(ranges, errors and errors[0])
        received, done = torch.empty_like(message), torch.futures.Future()

        def serve(future: Any) -> None:
            future.value()
            mean = self.code.decode(received).mean(0, keepdim=True)
            messages, gathered = all_gathered(self._encode(mean, errors and errors[1]))
            gathered.then(lambda ended: failing(finish, ended, messages))

        def finish(future: Any, messages: list[Any]) -> None:
            future.value()
            done.set_result(flat.copy_(self.code.decode(torch.cat(messages)).view(-1)[: flat.numel()]))

        def failing(step: Callable[..., None], *args: Any) -> None:
            try:
                step(*args)
            except Exception as error:
                done.set_exception(error)

        dist.all_to_all_single(received, message, async_op=True).get_future().then(lambda ended: failing(serve, ended))
        return done

    def _encode(self, x: Any, error: Any) -> Any:
        """The code of x and an earlier error, which becomes what this code has lost."""
        if error is None:
            return self.code.encode(x)
        whole = x + error
        message = self.code.encode(whole)
        error.copy_(whole - self.code.decode(message))
        return message


_orthogonalize = powerSGD_hook._orthogonalize


def _orthogonalize_some(matrices: Any, epsilon: float = 0) -> None:
    """PyTorch's, of one matrix too: `batched_powerSGD_hook` hands it one, and it asserts that they are several."""
    _orthogonalize(matrices if matrices.ndim == 3 else matrices[None], epsilon)


powerSGD_hook._orthogonalize = _orthogonalize_some


def _power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)


@dataclass(frozen=True)
class Side:
    """A way for DDP to exchange gradients."""

    hook: Callable[[], Any] | None = None
    """Makes the hook; None is DDP's own all-reduce."""
    state: Callable[[], Any] = lambda: None
    """Makes the hook's state."""
    bucket_mb: int | None = None
    """PyTorch's own is 25 MB, and 1 MB for the first bucket; if it is given, it holds for the first one too."""

    def register(self, model: Any) -> None:
        """Gives a DistributedDataParallel the hook."""
        if self.hook is not None:
            model.register_comm_hook(self.state(), self.hook())


SIDES = {
    "no exchange": Side(lambda: debugging_hooks.noop_hook),
    "plain": Side(),
    "plain, 1 MB buckets": Side(bucket_mb=1),
    "fp16 hook": Side(lambda: default_hooks.fp16_compress_hook),
    "fp16 hook, 1 MB buckets": Side(lambda: default_hooks.fp16_compress_hook, bucket_mb=1),
    "bf16 hook": Side(lambda: default_hooks.bf16_compress_hook),
    "powerSGD hook, rank 4": Side(lambda: powerSGD_hook.powerSGD_hook, _power_sgd, 25),
    "batched powerSGD hook, rank 4": Side(lambda: powerSGD_hook.batched_powerSGD_hook, _power_sgd, 25),
    "top-k 1 %, by hand": Side(lambda: TopK(0.01)),
    "top-k 1 %, by hand, 1 MB buckets": Side(lambda: TopK(0.01), bucket_mb=1),
    "int8 all-gather, by hand": Side(lambda: int8_all_gather),
    "int8 two-phase, by hand": Side(lambda: TwoPhase(Int8(), error_feedback=False), bucket_mb=25),
    "1 bit two-phase, by hand": Side(lambda: TwoPhase(OneBit(), error_feedback=True), bucket_mb=25),
}
