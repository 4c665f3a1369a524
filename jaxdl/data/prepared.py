"""Finds, checks and opens a data set prepared by TensorFlow Datasets; names missing and damaged files.

The libraries raise many classes of errors for a broken folder, most without the file name. Here each becomes a
ConfigError that names the file, what is wrong with it, and the remedy.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import os
import re
import resource
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import remote
from jaxdl.data.records import BadRecord
from jaxdl.data.staging import Stage
from jaxdl.parallel.cluster import ClusterError

_READERS = 16
"""Record files checked concurrently, because the checks wait for disks and networks, not for the CPU."""
_SPARE_FILES = 64
"""Open files of a process besides those of the data set."""


class Unreadable(BadRecord):
    """A record that cannot be read; `index` is its number in the split."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


def open_builder(name: str, data_dir: str | None) -> Any:
    """The library's builder of a prepared data set; its `info` describes the data.

    Raises ConfigError if there is no such data set, its dataset_info.json or features.json is damaged, or this user may
    not read it; and ClusterError if its disk does not answer for 20 seconds.
    """
    with _reachable(name):
        return _open_builder(name, data_dir)


def _open_builder(name: str, data_dir: str | None) -> Any:
    import tensorflow_datasets as tfds

    if data_dir is not None and not remote.is_remote(data_dir):
        _check_root(name, data_dir)

    def find() -> tuple[Any, bool]:
        builder = tfds.builder(name, data_dir=data_dir)
        return builder, builder.is_prepared()

    try:
        builder, prepared = remote.patiently(lambda: name, find)
    except (PermissionError, remote.Outage):
        raise
    except Exception as error:  # Of many classes, for a broken folder.
        reason = remote.first_line(error)
        if (folder := _find_folder(name, data_dir)) is not None:
            fault = _metadata_fault(folder) or f"{folder}: it cannot be opened as a data set ({reason})"
            raise ConfigError(f"tfds {name}: {fault}. {_again(name, folder, data_dir)}") from None
        check = "credentials, network, name" if data_dir and remote.is_remote(data_dir) else "name"
        raise ConfigError(f"tfds {name}: {reason} Check {check} and version. {_advice(name, data_dir)}") from None
    folder = str(builder.data_dir)
    if not prepared and any(Path(folder).glob("*array_record*")) and (fault := _metadata_fault(folder)):
        raise ConfigError(f"tfds {name}: {fault}. {_again(name, folder, data_dir)}")
    if not prepared:
        raise ConfigError(f"tfds {name}: not prepared in {builder.data_dir}. {_advice(name, data_dir)}")
    file_format = getattr(builder.info.file_format, "value", None)
    if file_format != "array_record":
        raise ConfigError(
            f"tfds {name}: prepared in {builder.data_dir} as {file_format}, which cannot be read by index without "
            f"TensorFlow. Move that folder away. {_advice(name, data_dir)}"
        )
    return builder


def staged_folder(stage: Stage, name: str, data_dir: str | None) -> str:
    """The copy of the folder of prepared data sets that has this one. Raises ConfigError as `open_builder` does."""
    builder = open_builder(name, data_dir or os.environ.get("TFDS_DATA_DIR"))
    inner = builder.info.full_name
    return stage.folder(str(builder.data_dir).rstrip("/").removesuffix(f"/{inner}"), (inner,))


def _check_root(name: str, data_dir: str) -> None:
    root = expand_home(data_dir)
    try:
        remote.patiently(lambda: data_dir, lambda: os.stat(f"{root}/."))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"tfds {name}: {data_dir}: no such folder. Set data_dir (or TFDS_DATA_DIR) to the folder of the prepared "
            f"data sets. {_advice(name, data_dir)}"
        ) from None


@contextlib.contextmanager
def _reachable(name: str) -> Iterator[None]:
    """Context of opening a data set: missing permission and an unresponsive disk are not reported as damage."""
    try:
        yield
    except PermissionError as error:
        place = str(error.filename).removesuffix("/.")
        raise ConfigError(
            f"tfds {name}: {place}: it cannot be read ({error.strerror}). Ask its owner for permission (chmod -R a+rX "
            "on the folder of the data set), or start jaxdl as a user who has it."
        ) from None
    except remote.Outage as error:
        raise ClusterError(f"tfds {name}: out of reach: {error}") from None


def find_test_split(builder: Any) -> str:
    """ "test" or "validation", the first that the data set has. Raises ConfigError if it has neither."""
    for split in ("test", "validation"):
        if split in builder.info.splits:
            return split
    if not builder.info.splits:
        path = f"{builder.data_dir}/dataset_info.json"
        raise ConfigError(f"tfds {builder.name}: {path}: it has no splits. {_build_again(builder)}")
    raise ConfigError(
        f"tfds {builder.name}: it has neither a test nor a validation split, but {', '.join(builder.info.splits)}. "
        'Set test_split (and train_split), for instance to "train[90%:]" (and "train[:90%]").'
    )


def open_split(builder: Any, split: str, keys: Sequence[str], *, check: bool = True) -> StoredSplit:
    """The examples of a split by index, with encoded images.

    Args:
      builder: result of `open_builder`.
      split: the split or a slice of it, `train[:90%]`.
      keys: features that every example must have.
      check: check that each record file exists, is complete at its end, and has as many records as dataset_info.json
        says. Takes about a millisecond per file on a local disk.

    Raises:
      ConfigError: an unknown or empty split, or a file that is missing, truncated, damaged at its end or unreadable for
        this user.
      ClusterError: the disk does not answer for 20 seconds.
    """
    with _reachable(builder.name):
        return _open_split(builder, split, keys, check)


def _open_split(builder: Any, split: str, keys: Sequence[str], check: bool) -> StoredSplit:
    import tensorflow_datasets as tfds

    images = [key for key, feature in builder.info.features.items() if isinstance(feature, tfds.features.Image)]
    decoders = {key: tfds.decode.SkipDecoding() for key in images}
    try:
        info = builder.info.splits[split]
        count, files = info.num_examples, info.file_instructions
        if count == 0 or not files:
            raise ConfigError(f"tfds {builder.name}, split {split!r}: it has no examples. {_splits(builder)}")
        if check:
            _check_files(builder, files)
        source = remote.patiently(
            lambda: str(builder.data_dir), lambda: builder.as_data_source(split=split, decoders=decoders or None)
        )
    except (ConfigError, PermissionError, remote.Outage):
        raise
    except Exception as error:  # As above.
        if fault := _metadata_fault(str(builder.data_dir)):
            raise ConfigError(f"tfds {builder.name}: {fault}. {_build_again(builder)}") from None
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
        raise ConfigError(f"tfds {builder.name}, split {split!r}: {text} {_splits(builder)}") from None
    return StoredSplit(source, files, keys)


def _splits(builder: Any) -> str:
    sizes = ", ".join(f"{name} ({info.num_examples:,} examples)" for name, info in builder.info.splits.items())
    return f"The splits are {sizes}."


class StoredSplit:
    """The examples of a split by number, 0 <= index < len(stored), each a dict of its features."""

    def __init__(self, source: Any, files: Sequence[Any], keys: Sequence[str]) -> None:
        self._source, self._files, self._keys = source, files, keys
        self._ends = np.cumsum([file.take for file in files])

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """An example. Raises Unreadable if it is damaged, and Outage if a network disk fails for 20 seconds."""
        try:
            return remote.patiently(lambda: self._place(index), lambda: self._whole(index, self._source[index]))
        except (BadRecord, remote.Outage):
            raise
        except Exception as error:  # As above.
            raise Unreadable(index, f"{self._place(index)} cannot be read ({remote.first_line(error)})") from None

    def many(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several examples in one read. Raises as `[]` does."""
        try:
            examples = self._source.__getitems__(list(indices))
        except Exception:  # Without the index: read one by one to find it.
            return [self[index] for index in indices]
        return [self._whole(index, example) for index, example in zip(indices, examples, strict=True)]

    def _whole(self, index: int, example: dict[str, Any]) -> dict[str, Any]:
        for key in self._keys:
            if example.get(key) is None:
                raise Unreadable(index, f"{self._place(index)} has no {key!r}")
        return example

    def _place(self, index: int) -> str:
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[number]
        return f"record {file.skip + index - (self._ends[number] - file.take)} of {file.filename}"


def _check_files(builder: Any, files: Sequence[Any]) -> None:
    """Raises ConfigError for record files that are missing, damaged, or have a wrong number of records."""
    _allow_files(builder.name, len(files))
    with ThreadPoolExecutor(min(_READERS, len(files))) as threads:
        counts = [file.examples_in_shard for file in files]
        faults = [fault for fault in threads.map(_file_fault, [str(file.filename) for file in files], counts) if fault]
    if faults:
        more = f" ({len(faults)} of its files are missing or damaged)" if len(faults) > 1 else ""
        raise ConfigError(f"tfds {builder.name}: {faults[0]}{more}. {_build_again(builder)}")


def _allow_files(name: str, count: int) -> None:
    """Increases this process's limit of open files for `count` record files; raises ConfigError if it cannot.

    The soft limit, 1,024 on most systems, exists for programs that cannot handle more. Child processes inherit the new
    limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, wanted = count + _SPARE_FILES, 2 * count + 1024  # The other split has files too.
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"tfds {name}: all of its {count:,} record files must be open at once, but this process may open only "
            f"{soft:,} files and cannot raise that limit. Raise it before the start: ulimit -n {2 * count + 1024} "
            "(above ulimit -Hn only root can; in a container, use --ulimit nofile)."
        )


def _file_fault(file: str, count: int) -> str | None:
    """The fault of a record file that should have `count` records; None if its end shows none.

    Raises PermissionError, and Outage for a disk that does not answer.
    """
    try:
        return remote.patiently(lambda: file, lambda: _look_at(file, count))
    except (PermissionError, remote.Outage):
        raise
    except FileNotFoundError:
        return f"{file}: the file is missing"
    except OSError as error:
        return f"{file}: it cannot be read ({error.strerror})"
    except Exception as error:  # As above.
        return f"{file}: it is cut off or damaged ({str(error).strip() or 'its end is missing'})"


def _look_at(file: str, count: int) -> str | None:
    """Like `_file_fault`, but raises the errors of the system and of the reader."""
    module: Any = importlib.import_module("array_record.python.array_record_module")  # It has no types.
    if not remote.is_remote(file):
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # A pipe must not block here.
        try:
            status = os.fstat(opened)
        finally:
            os.close(opened)
        if not stat.S_ISREG(status.st_mode):
            return f"{file}: it is not a regular file"
        if status.st_size == 0:
            return f"{file}: it is empty"
    reader = module.ArrayRecordReader(file, options="readahead_buffer_size:0", file_reader_buffer_size=32768)
    num_records, whole = reader.num_records(), reader.ok()
    reader.close()  # Raises the reader's error.
    if not whole:
        return f"{file}: it is cut off or damaged"
    if num_records != count:
        return f"{file}: it has {num_records:,} records, and dataset_info.json says {count:,}"
    return None


def _find_folder(name: str, data_dir: str | None) -> str | None:
    """The local folder of the newest matching version of a data set; None if there is none."""
    if data_dir is not None and remote.is_remote(data_dir):
        return None
    base, _, version = name.partition(":")
    root = expand_home(data_dir or "~/tensorflow_datasets") / base
    try:
        versions = [path for path in (*root.glob("*"), *root.glob("*/*")) if re.fullmatch(r"\d+\.\d+\.\d+", path.name)]
    except OSError:
        return None
    versions = [path for path in versions if path.is_dir() and fnmatch.fnmatch(path.name, version or "*")]
    newest = max(versions, key=lambda path: tuple(map(int, path.name.split("."))), default=None)
    return None if newest is None else str(newest)


def _metadata_fault(folder: str) -> str | None:
    """The fault of the two files that describe a data set; None if none is found, or in the cloud.

    Raises PermissionError, and Outage for a disk that does not answer.
    """
    if remote.is_remote(folder):
        return None
    for name in ("dataset_info.json", "features.json"):
        path = Path(folder, name)
        try:
            content = json.loads(remote.patiently(lambda path=path: str(path), path.read_bytes).decode())
        except FileNotFoundError:
            return f"{path}: the file is missing"
        except (PermissionError, remote.Outage):
            raise
        except OSError as error:
            return f"{path}: it cannot be read ({error.strerror})"
        except ValueError as error:  # Not JSON, or not UTF-8.
            return f"{path}: it is {'empty' if path.stat().st_size == 0 else f'not JSON ({error})'}"
        needed = ("version", "splits") if name == "dataset_info.json" else ("pythonClassName",)
        missing = [key for key in needed if not isinstance(content, dict) or key not in content]
        if missing:
            return f"{path}: it has no {missing[0]!r}"
        if name == "dataset_info.json" and (fault := _splits_fault(content["splits"])):
            return f"{path}: {fault}"
    return None


def _splits_fault(splits: Any) -> str | None:
    if not isinstance(splits, list):
        return "its splits are not a list"
    for split in splits:
        if not isinstance(split, dict) or not split.get("name"):
            return "one of its splits has no name"
        lengths = split.get("shardLengths", [])
        if not isinstance(lengths, list) or not all(re.fullmatch(r"\d+", str(length)) for length in lengths):
            return f"the shardLengths of split {split['name']!r} are {json.dumps(lengths)}, not a list of counts"
    return None


def _advice(name: str, data_dir: str | None) -> str:
    where = "" if data_dir else " TFDS_DATA_DIR or data_dir is the folder of prepared data sets."
    return (
        "To prepare it, on any machine with TensorFlow (reading needs none):\n"
        f"  {_command(name, data_dir)}\n"
        f"and copy the folder here if that was another machine.{where}"
    )


def _build_again(builder: Any) -> str:
    folder, (*name, _) = str(builder.data_dir).rstrip("/"), builder.info.full_name.split("/")
    return _again("/".join(name), folder, folder.rsplit("/", len(name) + 1)[0])


def _again(name: str, folder: str, data_dir: str | None) -> str:
    if remote.is_remote(folder):
        return f"Check the credentials and the network, or copy {folder} again from where it was prepared."
    return (
        f"Copy {folder} again from where it was prepared, or remove it and prepare the data set again:\n"
        f"  {_command(name, data_dir)}"
    )


def _command(name: str, data_dir: str | None) -> str:
    folder = f" --data_dir={data_dir}" if data_dir else ""
    return f"pip install tensorflow tensorflow-datasets && tfds build {name} --file_format=array_record{folder}"
