"""Reads `pytorch_model.bin`, and executes nothing that is in it.

Such a file is a zip archive: `data.pkl`, a pickle of a dictionary of tensors, and a member for the numbers of each, one
after the other (https://docs.pytorch.org/docs/stable/notes/serialization.html). A pickle may name any function, which
an unpickler calls. The one here knows a few names alone, those of a tensor's description, and makes descriptions of
them; it refuses every other by its name. The numbers are mapped from the file.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.tensors import DTYPES, Reader, Stored

_STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""The classes of a tensor's numbers -> their dtypes, as in a safetensors file."""
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MOST_PICKLE_BYTES = 100_000_000
_MOST_ORDER_BYTES = 16
_LOCAL_HEADER = 30
"""Bytes of a member's header in the archive, before its name and what else is known of it."""
_ADVICE = (
    "Save it again where it came from, with model.save_pretrained(FOLDER), which writes safetensors; or fetch the "
    "safetensors of the checkpoint."
)


@dataclass(frozen=True)
class StridedTensor(Stored):
    """A tensor whose numbers are `strides` apart from each other in a file, in each dimension."""

    strides: tuple[int, ...] = ()

    def read(self) -> np.ndarray:
        """The tensor, mapped from the file. Raises ConfigError for a dtype that is not converted."""
        row_major = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        if 0 in self.shape or self.dtype not in DTYPES or self.strides == row_major:
            return super().read()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        numbers = np.memmap(self.path, DTYPES[self.dtype], "r", self.start, (extent,))
        steps = [stride * numbers.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(numbers, self.shape, steps, writeable=False)


class _Fixed:
    """What a pickle makes and must not change afterwards."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> NoReturn:
        """Raises ValueError: an unpickler calls this where a pickle changes an object (BUILD)."""
        del state
        raise ValueError("it changes what describes a tensor")


@dataclass(frozen=True)
class _Storage(_Fixed):
    """The numbers of tensors: the member of the archive, and how many there are of which dtype."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True)
class _Described(_Fixed):
    """A tensor as the pickle describes it, which is not checked yet."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def check(self) -> None:
        """Raises ValueError for a tensor that is not within its numbers."""
        sizes = self.shape, self.strides
        if not isinstance(self.storage, _Storage) or len(sizes[0]) != len(sizes[1]):
            raise ValueError("a tensor is not described as PyTorch does")
        if not all(type(x) is int and x >= 0 for x in (self.offset, *sizes[0], *sizes[1])):
            raise ValueError("a tensor has a size that is no whole number from 0")
        last = self.offset + sum((size - 1) * stride for size, stride in zip(*sizes, strict=True))
        if 0 not in sizes[0] and last >= self.storage.count:
            raise ValueError("a tensor has more numbers than are stored for it")


class _RebuildTensor(_Fixed):
    """`torch._utils._rebuild_tensor_v2`. An object, as a pickle could set attributes of a function."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Described:
        """The rest is about gradients."""
        del rest
        return _Described(storage, offset, tuple(shape), tuple(strides))


class _RebuildParameter(_Fixed):
    """`torch._utils._rebuild_parameter`."""

    __slots__ = ()

    def __call__(self, tensor: Any, *rest: Any) -> Any:
        """The tensor; the rest is about gradients."""
        del rest
        return tensor


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}
"""What a pickle may name."""


class _Refused(Exception):
    """A name in a pickle that is not known."""


class _Unpickler(pickle.Unpickler):
    """Makes descriptions of tensors; calls nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            raise _Refused(f"{module_name}.{global_name}") from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or dtype not in _BYTES or not isinstance(key, str) or type(count) is not int:
            raise ValueError("it names something else than the numbers of a tensor")
        return _Storage(key, dtype, count)


def tensors_in_bin(path: Path) -> dict[str, Stored]:
    """The tensors of a `.bin` file of PyTorch, by name; their numbers are not read.

    Raises ConfigError for a file that is damaged, that names anything but tensors, or that has the form from before
    PyTorch 1.6. Raises OSError.
    """
    if not zipfile.is_zipfile(path):
        _refuse_older(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            name = next((name for name in members if name.endswith("/data.pkl") or name == "data.pkl"), None)
            if name is None or any("/code/" in other for other in members):
                raise ConfigError(f"{path}: not a dictionary of tensors, but another archive of PyTorch's. {_ADVICE}")
            head = name.removesuffix("data.pkl")
            order = members.get(f"{head}byteorder")
            if order is not None and _content(archive, order, _MOST_ORDER_BYTES) != b"little":
                raise ConfigError(f"{path}: its numbers are big-endian, which is not converted. {_ADVICE}")
            content = _unpickled(_content(archive, members[name], _MOST_PICKLE_BYTES))
            return _found(path, head, content, members)
    except _Refused as error:
        raise ConfigError(
            f"{path}: it names {error}, which would be executed by PyTorch. jaxdl reads tensors alone, and executes "
            f"nothing. {_ADVICE}"
        ) from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, ValueError, KeyError, TypeError, IndexError, AttributeError,
            EOFError, RecursionError, MemoryError, OverflowError, NotImplementedError, RuntimeError,
            pickle.UnpicklingError) as error:  # fmt: skip
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a file of tensors, or a damaged one ({error}). Fetch it again.") from None


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """The bytes of a member. Raises ValueError for one that is compressed, as PyTorch's never are, or too large."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
        raise ValueError(f"{info.filename} is compressed, or has {info.file_size:,} bytes")
    return archive.read(info)


def _refuse_older(path: Path) -> NoReturn:
    """Raises ConfigError for a file that is no zip archive."""
    with path.open("rb") as file:
        head = file.read(2)
    older = head[:1] == b"\x80"  # A pickle.
    why = "it has the form from before PyTorch 1.6, which is not read" if older else "not a file of tensors"
    raise ConfigError(f"{path}: {why}. {_ADVICE if older else 'Fetch it again.'}")


def _unpickled(content: bytes) -> Any:
    """The object in a pickle. Raises _Refused for the first name that is not known."""
    strings: list[str] = []
    for opcode, argument, _ in pickletools.genops(content):
        # Both forms of a name: in one operation, or in two strings before it. Nothing is made of these yet.
        if opcode.name == "GLOBAL" and isinstance(argument, str):
            module, _, name = argument.partition(" ")
            if (module, name) not in _KNOWN:
                raise _Refused(f"{module}.{name}")
        elif opcode.name in ("INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            raise _Refused(f"{strings[-1] if strings else 'an object'} ({opcode.name})")
        elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            # An unpickler makes room for as many as the highest number says.
            if isinstance(argument, int) and argument > len(content):
                raise ValueError(f"it remembers an object under the number {argument}")
        elif isinstance(argument, str):
            strings.append(argument)
    return _Unpickler(io.BytesIO(content)).load()


def _found(path: Path, head: str, content: Any, members: Mapping[str, zipfile.ZipInfo]) -> dict[str, Stored]:
    """The tensors of a dictionary. Raises ValueError for one whose numbers are not in the archive."""
    if not isinstance(content, dict):
        raise ValueError(f"its content is {type(content).__name__}, not a dictionary of tensors")
    if "state_dict" in content and isinstance(content["state_dict"], dict):
        content = content["state_dict"]
    starts: dict[str, int] = {}
    tensors: dict[str, Stored] = {}
    for name, tensor in dict.items(content):  # A pickle may give an OrderedDict another `items`.
        if not isinstance(tensor, _Described):
            raise ValueError(f"{name} is {type(tensor).__name__}, not a tensor")
        tensor.check()
        storage = tensor.storage
        info = members[f"{head}data/{storage.key}"]
        size = _BYTES[storage.dtype]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size < storage.count * size:
            raise ValueError(f"the numbers of {name} are compressed, or cut off")
        start = starts.setdefault(storage.key, _start(path, info))
        tensors[str(name)] = StridedTensor(
            path, storage.dtype, tensor.shape, start + tensor.offset * size, tensor.strides
        )
    return tensors


def _start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin in the file."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"{info.filename} is not where the archive says")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    start = info.header_offset + _LOCAL_HEADER + name + extra
    if start + info.file_size > path.stat().st_size:
        raise ValueError(f"{info.filename} is cut off")
    return start


READERS: Mapping[str, Reader] = {".bin": tensors_in_bin}
"""The end of a file's name -> what finds its tensors."""
