"""What a run records in its workdir beside its config: its data, and what was chosen when it began."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.fields import SOURCE
from jaxdl.core.files import (
    CHECKPOINTS_FOLDER,
    CHOICE_FILE,
    DATA_FILE,
    EXAMPLES_FILE,
    PLAN_FILE,
    STACKS_FILE,
    step_folder,
)
from jaxdl.core.kinds import find
from jaxdl.data import DataSpec, spec_from_json, spec_to_json
from jaxdl.data.source import Former
from jaxdl.exchange import ExchangeConfig
from jaxdl.models.stacks import Dims
from jaxdl.parallel.cluster.agree import of_first_process
from jaxdl.report import replace_file
from jaxdl.training.run.workdir.kept_layout import Kept
from jaxdl.training.run.workdir.workdir import read_file, refused, write_file

_MOST_LETTERS = 200
"""Of a value in a message."""


@dataclass(frozen=True)
class Workdir:
    """The records of the run in a folder; without a folder, and where no run has begun, there are none.

    The first process reads for all. Each method raises ConfigError, on all of them, for a file that cannot be read.
    """

    path: Path | None = None

    def read_spec(self) -> DataSpec | None:
        """What the examples of the run are like, from `data.json`."""
        content = self._read(DATA_FILE)
        try:
            return spec_from_json(content.decode()) if content else None
        except (ValueError, KeyError, TypeError):
            raise self._unreadable(DATA_FILE, "this is not a specification of data") from None

    def read_examples(self) -> dict[str, Any] | None:
        """Which examples the run sees, from `examples.json`.

        None also for a file that cannot be read: `keep_examples` says so.
        """
        content = self._read(EXAMPLES_FILE)
        try:
            return json.loads(content) if content else None
        except ValueError:
            return None

    def read_exchange(self) -> ExchangeConfig | None:
        """The exchange that was chosen for the run, from `exchange.json`."""
        content = self._read(CHOICE_FILE)
        if not content:
            return None
        try:
            values = json.loads(content)["exchange"]
            return find(ExchangeConfig, values["kind"], values.get(SOURCE)).model_validate(values)
        except (ValueError, KeyError, TypeError):
            raise self._unreadable(CHOICE_FILE, "this is not a choice of an exchange") from None

    def read_stacks(self) -> dict[str, Dims] | None:
        """The stacks of a user's network as they were when the run began, from `stacks.json`; None where it begins now.

        They decide what the state of its optimizer is like. A run with checkpoints and no such file has none: earlier
        versions knew none.
        """
        if (path := self.path) is None:
            return None
        begun = of_first_process(lambda: b"1" * any((path / CHECKPOINTS_FOLDER).glob(step_folder("*"))))
        content = self._read(STACKS_FILE)
        if not content:
            return {} if begun else None
        try:
            stacks = json.loads(content).items()
            return {name: (*range(dims),) if isinstance(dims, int) else (*map(int, dims),) for name, dims in stacks}
        except (ValueError, TypeError, AttributeError):
            raise self._unreadable(STACKS_FILE, "it does not say which parameters are stacked") from None

    def read_layout(self) -> Kept | None:
        """The layout that was planned for the run, from `plan.json`."""
        content = self._read(PLAN_FILE)
        try:
            return Kept.from_json(content.decode()) if content else None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self.path}/{PLAN_FILE}: this is no plan. Restore it, or remove it: the layout is then planned again."
            ) from None

    def _read(self, name: str) -> bytes:
        return b"" if self.path is None else read_file(self.path / name)

    def _unreadable(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{self.path}/{name}: {why}. Restore it, or choose another --workdir.")


def _encoded(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def keep_examples(
    workdir: Path, content: Mapping[str, Any], former: Mapping[str, Container[str]] | None = None
) -> None:
    """Records in `examples.json` which examples a run sees, or checks that a resumed run sees the same.

    `former` are other contents of the same examples, as earlier versions recorded them: the file is written again then.
    Other examples would change the shuffled stream: some would be seen twice and some never. Raises ConfigError, on all
    processes, when they changed or the file cannot be read or written.
    """
    path = workdir / EXAMPLES_FILE

    def keep() -> bytes:
        try:
            if not path.exists():
                replace_file(path, _encoded(content))
            before = json.loads(path.read_bytes())
            known = {split: names for split, names in (former or {}).items() if before[split]["content"] in names}
            kept = {split: dict(now) for split, now in content.items()}
            for split, names in known.items():
                if isinstance(names, Former):
                    kept[split]["content"] = names.kept(before[split]["content"])
                before[split]["content"] = content[split]["content"]
            if known and before == content:
                replace_file(path, _encoded(kept))
            counts = [before[split]["examples"] for split in content]
        except OSError as error:
            raise refused(workdir, error) from None
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{path}: it cannot be read. Restore it, or choose another --workdir.") from None
        for (split, now), count in zip(content.items(), counts, strict=True):
            if before[split] != now:
                change = (
                    f"{count:,} examples, and has {now['examples']:,} now"
                    if count != now["examples"]
                    else f"other examples than now (as many, {count:,})"
                )
                raise ConfigError(
                    f"--workdir {workdir}: the data changed since its run began. Its {split} split had {change}. "
                    "Restore the data, or choose another --workdir."
                )
        return b""

    of_first_process(keep)


_NOT_KNOWN: dict[str, Any] = {"class_names": [], "num_rows": None}
"""Fields of specs that earlier versions did not record, as they are read then."""


def keep_spec(workdir: Path, spec: DataSpec) -> None:
    """Records in `data.json` what the examples of a run are like, or checks that a resumed run reads them so too.

    Raises ConfigError, on all processes, when they are read in another way, or the file cannot be read or written.
    """
    recorded, content = Workdir(workdir).read_spec(), spec_to_json(spec)

    if recorded is None:
        write_file(workdir / DATA_FILE, content.encode())
        return
    there, here = json.loads(spec_to_json(recorded)), json.loads(content)
    earlier = {name: value for name, value in _NOT_KNOWN.items() if name in here and there.get(name) == value}
    if there != here and there == {**here, **earlier}:
        write_file(workdir / DATA_FILE, content.encode())
        return
    changes = ", ".join(f"{name} was {_short(there.get(name))}, is {_short(here.get(name))}"
                        for name in here if there.get(name) != here[name])  # fmt: skip
    if there != here:
        raise ConfigError(
            f"--workdir {workdir}: its network was trained on {recorded.modality} ({recorded.described()[1]}); the "
            f"data are {spec.modality} ({spec.described()[1]}) now: {changes}. Give the data as they were, or choose "
            "another --workdir."
        )


def _short(value: Any) -> str:
    """A value in a message: the names of a thousand classes would hide the rest."""
    text = str(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def choice_file(workdir: Path, config: Config, reasons: Sequence[str]) -> dict[str, bytes]:
    """`exchange.json` and its content: the exchange that was chosen for a run, and why. Nothing if it is there."""
    if (workdir / CHOICE_FILE).exists():
        return {}
    text = json.dumps({"exchange": config.model_dump(mode="json"), "reasons": list(reasons)}, indent=2)
    return {CHOICE_FILE: (text + "\n").encode()}


def stacks_file(stacks: Mapping[str, Dims]) -> dict[str, bytes]:
    """`stacks.json` and its content: the stacks of a user's network, for when the run resumes. Nothing without any.

    By parameter, how many leading dimensions count layers; where others do, the list of these.
    """
    content = {name: len(dims) if dims == (*range(len(dims)),) else dims for name, dims in stacks.items()}
    return {STACKS_FILE: (json.dumps(content, indent=2) + "\n").encode()} if stacks else {}
