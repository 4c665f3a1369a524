"""How the photographs of a folder are laid out: class folders in `train/` and `val/`, or class folders alone."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxdl.core.config import ConfigError
from jaxdl.data import remote

TRAIN_NAMES = ("train", "training")
"""Names of a folder of training images, in lower case, where no other one is asked for."""
TEST_NAMES = ("val", "valid", "validation", "test", "testing")
"""Names of a folder of held-out images: the first that is there is read."""
LAYOUTS = (
    "Layouts that are read: FOLDER/train/cat/1.jpg and FOLDER/val/cat/2.jpg (or valid, validation, test); or "
    "FOLDER/cat/1.jpg, of which a part is held out (--data.test-fraction)."
)
TEST_FRACTION = 0.2
"""Part of the images that is held out where there is no folder of held-out ones, unless another is asked for."""
_SHOWN = 5


@dataclass(frozen=True)
class Layout:
    """Where the images of a folder are.

    Attributes:
      root: the folder, without a slash at its end.
      train: the folder below it with the class folders of the training images; empty if they are in the root itself.
      test: that of the held-out images; None if a part of the training folder is held out.
      test_fraction: that part.
      not_read: folders that are beside these.
    """

    root: str
    train: str
    test: str | None
    test_fraction: float
    not_read: tuple[str, ...] = ()

    @property
    def train_address(self) -> str:
        """The folder of the class folders of the training images."""
        return f"{self.root}/{self.train}" if self.train else self.root

    @property
    def test_address(self) -> str:
        """That of the held-out images."""
        return self.train_address if self.test is None else f"{self.root}/{self.test}"

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders below the root that are read; an empty name is the root itself."""
        return (self.train,) if self.test is None else (self.train, self.test)

    @property
    def text(self) -> str:
        """How it is laid out, in words."""
        if self.test is not None:
            return f"{self.train}/ to train on, {self.test}/ held out"
        place = f"the images of {self.train}/" if self.train else "the images"
        share = f"{100 * self.test_fraction:.4g} %"
        return f"class folders; {share} of {place} are held out, by the hash of each path: always the same ones"


def find_layout(root: str, train: str | None, test: str | None, test_fraction: float | None) -> Layout:
    """The layout of a folder. `train` and `test` name its folders; None takes a usual name.

    With a `test_fraction` a part of the training images is held out whatever other folders there are. Raises
    ConfigError for a folder that is laid out otherwise.
    """
    folders, files = remote.list_folder(root)
    held = test_fraction or TEST_FRACTION
    train_names, test_names = (train,) if train else TRAIN_NAMES, (test,) if test else TEST_NAMES
    train_folder = _first(folders, train_names)
    others = [name for name in folders if name.lower() not in TRAIN_NAMES + TEST_NAMES]
    classes = [] if train_folder is None else remote.list_folder(f"{root}/{train_folder}")[0]
    if train_folder is not None and (classes or not others or train):
        if not classes:
            raise no_classes(f"{root}/{train_folder}")
        left = [name for name in folders if name != train_folder]
        if test_fraction is not None:
            return Layout(root, train_folder, None, held, tuple(left))
        test_folder = _first(left, test_names)
        if test_folder is None:
            raise _no_test(root, train_folder, test_names, files)
        return Layout(root, train_folder, test_folder, held, tuple(name for name in left if name != test_folder))
    if train:
        raise ConfigError(f"{root}/{train} (--data.train-folder): no such folder. {_there(folders, files)} {LAYOUTS}")
    if test:
        raise ConfigError(
            f"--data.test-folder {test}: {root} has no folder of training images beside it. {_there(folders, files)} "
            f"{LAYOUTS}"
        )
    if train_folder is None and (held_out := _first(folders, TEST_NAMES)):
        raise ConfigError(
            f"{root}: it has {held_out}/, and no train/ beside it. {_there(folders, files)} {LAYOUTS} A class of this "
            "name needs another one."
        )
    if not others:  # Only held-out images, or nothing.
        raise ConfigError(f"{root}: it has no class folders. {_there(folders, files)} {_inner(root, folders)}{LAYOUTS}")
    return Layout(root, "", None, held)


def is_held_out(name: str, test_fraction: float) -> bool:
    """Whether an image is held out, from its path below the folder of the class folders, `cat/1.jpg`.

    It depends on the path alone, so new images move no other one from one part to the other; nor does another form of
    the same letters, as file systems have them (NFC or NFD).
    """
    path = unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(path).digest()[:8], "little") < test_fraction * 2**64


def class_of(name: str) -> str:
    """The class of an image, from its path below the folder of the class folders: its first folder, in NFC."""
    return unicodedata.normalize("NFC", name.split("/", 1)[0])


def no_classes(place: str, lost: str = "") -> ConfigError:
    """The error for a folder without images in class folders; `lost` are images that are not read."""
    also = f" Not read are {lost}." if lost else ""
    return ConfigError(f"{place}: none of its images is in a class folder, such as {place}/cat/1.jpg.{also} {LAYOUTS}")


def one_class(layout: Layout, number: int, name: str) -> ConfigError:
    """The error for images of one class alone."""
    place = layout.train_address
    inner = remote.list_folder(f"{place}/{name}")[0]
    advice = f"If the classes are {', '.join(inner[:_SHOWN])}, give --data.folder {place}/{name}. " if inner else ""
    return ConfigError(
        f"{place}: all of its {number:,} images are of one class, {name!r}; classification needs 2 or more. {advice}"
        f"{LAYOUTS}"
    )


def _first(folders: Sequence[str], names: Iterable[str]) -> str | None:
    """The folder with the first of these names, however its letters are written."""
    return next((folder for name in names for folder in folders if folder.lower() == name.lower()), None)


def _no_test(root: str, train: str, names: Sequence[str], files: Sequence[str]) -> ConfigError:
    for name in names:
        if name in files:
            return ConfigError(f"{root}/{name}: it is a file, not a folder. {LAYOUTS}")
    wanted = f"no folder {names[0]}/" if len(names) == 1 else f"none of {', '.join(f'{name}/' for name in names)}"
    return ConfigError(
        f"{root}: it has {train}/, and {wanted} with held-out images. Make it, or give --data.test-fraction "
        f"{TEST_FRACTION}, which holds out a part of {train}/."
    )


def _there(folders: Sequence[str], files: Sequence[str]) -> str:
    names = [*(f"{name}/" for name in folders), *files]
    more = ", ..." if len(names) > _SHOWN else ""
    return f"It has {', '.join(names[:_SHOWN])}{more}." if names else "It is empty."


def _inner(root: str, folders: Sequence[str]) -> str:
    """A hint where the folder of an archive is inside another one."""
    return f"Did you mean --data.folder {root}/{folders[0]}? " if len(folders) == 1 else ""
