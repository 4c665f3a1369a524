"""The data of a network whose examples are not here: only how it reads its inputs is known."""

from __future__ import annotations

from pathlib import Path

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.images.photos import Photos
from jaxdl.data.source import Data, Splits


class Converted(Data, kind="converted"):
    """No examples, and the tokenizer of a network that another program trained."""

    tokenizer: str | None = None
    """The tokenizer's folder or file, relative to the workdir; None if the checkpoint had none."""

    def build(self) -> Splits:
        """Raises ConfigError: the examples are not here."""
        raise ConfigError("the network was converted, and its training data are not here. Give other --data.")

    def within(self, folder: Path) -> Converted:
        """The config with the whole path of the tokenizer, which is relative to `folder`."""
        if self.tokenizer is None:
            return self
        return self.replaced({"tokenizer": str(folder.absolute() / self.tokenizer)})

    def codec(self) -> Codec:
        """Between text and tokens. Raises ConfigError where the checkpoint had no tokenizer.

        A model of sentencepiece whose files do not say so puts its start before every text: it is that of a Llama or
        Mistral, whose class in transformers does (`add_bos_token` of LlamaTokenizer).
        """
        if self.tokenizer is None:
            raise ConfigError("the network was converted without a tokenizer. Put its tokenizer.json beside its config "
                              "and convert it again.")  # fmt: skip
        codec = Codec(self.tokenizer)
        if codec.kind != "sentencepiece" or codec.says_opening or codec.start is None:
            return codec
        return codec.with_opening((codec.start,))


class ConvertedPhotos(Data, kind="converted_photos"):
    """No examples, and how a network of images that another program trained reads photographs."""

    photos: Photos = Photos()
    """Size, crop and normalization of the images."""

    def build(self) -> Splits:
        """Raises ConfigError: the examples are not here."""
        raise ConfigError("the network was converted, and its training data are not here. Give other --data.")


class Kept(Data, kind="kept"):
    """No examples: those of a network that was copied out of its run, with its tokenizer."""

    tokenizer: str | None = None
    """The tokenizer's folder or file, relative to the workdir; None for bytes, and for what is not text."""
    photos: Photos | None = None
    """How photographs become inputs, for a network that reads them."""

    def build(self) -> Splits:
        """Raises ConfigError: the examples are not here."""
        raise ConfigError("only the network was copied, and its training data are not here. Give other --data.")

    def within(self, folder: Path) -> Kept:
        """The config with the whole path of the tokenizer, which is relative to `folder`."""
        if self.tokenizer is None:
            return self
        return self.replaced({"tokenizer": str(folder.absolute() / self.tokenizer)})

    def codec(self) -> Codec:
        """Between text and tokens."""
        return Codec(self.tokenizer)
