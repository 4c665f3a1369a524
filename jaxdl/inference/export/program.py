"""Predicts with the network in this folder: with ONNX Runtime, or with JAX. Made by `python -m jaxdl.export`.

    python predict.py photo.png            python predict.py rows.csv            python predict.py --text "a text"

    from predict import Predictor
    predictor = Predictor("exported")
    predictor.predict(inputs), predictor.probabilities(inputs)

It needs NumPy, and onnxruntime (for predict.onnx) or jax and flatbuffers (for predict.stablehlo); Pillow for the files
of photographs, tokenizers or sentencepiece for texts. It needs no jaxdl: predict.json says what the function takes.
"""

from __future__ import annotations

import argparse
import calendar
import csv
import datetime
import decimal
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
PLAIN = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
GROUPED = {
    ",": re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?"),
    ".": re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+(?:,\d*)?"),
}
DELIMITERS = ",;\t|"
COMMA = re.compile(r"[+-]?(?:\d+(?:,\d*)?|,\d+)(?:[eE][+-]?\d+)?")
TRUTHS = {"true": 1.0, "false": 0.0, "t": 1.0, "f": 0.0, "1": 1.0, "0": 0.0}


class Predictor:
    """The function in a folder, with what makes its inputs."""

    def __init__(self, folder: str | Path = ".", runtime: str | None = None) -> None:
        """`runtime` is "onnx" or "stablehlo"; by default the first that is there and whose package is installed."""
        self.folder = Path(folder)
        self.about = json.loads((self.folder / "predict.json").read_text(encoding="utf-8"))
        self.preparation = self.about["preparation"]
        self.call = self._load(runtime)
        self._library: Any = None

    def _load(self, runtime: str | None) -> Any:
        files = self.about["files"]
        packages = {"onnx": "onnxruntime", "stablehlo": "jax"}
        usable = [name for name in packages if name in files and importlib.util.find_spec(packages[name])]
        chosen = runtime or next(iter(usable), None)
        if chosen not in usable:
            raise SystemExit(f"install onnxruntime for predict.onnx, or jax for predict.stablehlo; there is {files}")
        path = self.folder / files[chosen]
        if chosen == "onnx":
            import onnxruntime  # pyright: ignore[reportMissingImports]

            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3  # It warns of shapes that it finds out itself.
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            return lambda arrays: session.run(None, arrays)[0]
        from jax import export

        function = export.deserialize(bytearray(path.read_bytes())).call
        takes_one = self.about["takes"] == "an array"
        return lambda arrays: np.asarray(function(next(iter(arrays.values())) if takes_one else arrays))

    def probabilities(self, inputs: Any) -> np.ndarray:
        """The outputs of the function: of a classifier the probabilities, float32 [example, class]."""
        arrays = self.arrays(inputs)
        return self.call({each["name"]: arrays[each["name"]].astype(each["dtype"]) for each in self.about["inputs"]})

    def predict(self, inputs: Any) -> list[Any]:
        """The name of the class of each example, or its number; of what has no classes the outputs."""
        return self.named(self.probabilities(inputs))

    def named(self, outputs: np.ndarray) -> list[Any]:
        """What `predict` returns, by the outputs of the function."""
        names = self.about["classes"]
        if self.preparation["kind"] == "columns" and not names:
            return outputs.reshape(-1).tolist()
        if outputs.ndim != 2:
            return list(outputs)
        return [names[number] if names else number for number in outputs.argmax(axis=1).tolist()]

    def arrays(self, inputs: Any) -> dict[str, np.ndarray]:
        """The arrays of what a user has, by name."""
        readers = {"columns": self._of_rows, "texts": self._of_texts, "images": self._of_images}
        reader = readers.get(self.preparation["kind"])
        if isinstance(inputs, dict) and all(isinstance(x, np.ndarray) for x in inputs.values()):
            return inputs
        if reader is None:
            return {self.about["inputs"][0]["name"]: np.asarray(inputs)}
        return reader(inputs)

    def _of_images(self, images: Any) -> dict[str, np.ndarray]:
        """Grey levels uint8 [image, height, width, channel], or a list of arrays; or paths of photographs."""
        name = self.about["inputs"][0]["name"]
        if not isinstance(images, np.ndarray):
            images = list(images)
            if images and all(hasattr(one, "shape") for one in images):
                if len({one.shape for one in images}) > 1:
                    raise SystemExit("the images have several sizes: give arrays of the size that the network reads")
                images = np.stack(images)
        if isinstance(images, np.ndarray):
            return {name: images if images.ndim == 4 else images[..., None]}
        from PIL import Image, ImageOps

        wanted, made = self.preparation, []
        for path in images:
            image = ImageOps.exif_transpose(Image.open(path)).convert("L" if wanted["channels"] == 1 else "RGB")
            size = (wanted["width"], wanted["height"])
            if wanted["fraction"] is not None:  # The centre square.
                side = min(image.size) * wanted["fraction"]
                left, top = ((whole - side) / 2 for whole in image.size)
                image = image.resize(size, Image.Resampling.BILINEAR, (left, top, left + side, top + side))
            elif image.size != size:
                raise SystemExit(f"{path}: the network reads images of {size[0]} x {size[1]} pixels")
            made.append(np.asarray(image, np.uint8).reshape(size[1], size[0], wanted["channels"]))
        return {name: np.stack(made)}

    def _of_texts(self, texts: Any) -> dict[str, np.ndarray]:
        """The tokens of texts, or of pairs of them as tuples."""
        rows, types = zip(*map(self._tokens, texts), strict=True)
        length = self.preparation["length"]
        padded = [[*row, *[0] * (length - len(row))] for row in rows]
        kinds = [[*row, *[0] * (length - len(row))] for row in types]
        return {"tokens": np.array(padded, np.int32), "num_tokens": np.array([len(row) for row in rows], np.int32),
                "types": np.array(kinds, np.int32)}  # fmt: skip

    def _tokens(self, text: Any) -> tuple[list[int], list[int]]:
        """(the tokens with those around a text, which text of a pair each is of)."""
        wanted = self.preparation
        first, second = (text, None) if isinstance(text, str) else text
        if wanted["frames_itself"]:
            library = self._tokenizer()
            library.enable_truncation(wanted["length"])
            made = library.encode(first, second)
            return made.ids, made.type_ids
        before, after = wanted["before"], wanted["after"]
        a, b = self._encode(first), [] if second is None else self._encode(second)
        room = wanted["length"] - len(before) - len(after) * (1 if second is None else 2)
        if len(a) + len(b) > room:  # The longer one is cut.
            kept = min(len(a), len(b), room // 2)
            a, b = (a[:kept], b[: room - kept]) if len(a) < len(b) else (a[: room - kept], b[:kept])
        head, tail = [*before, *a, *after], [] if second is None else [*b, *after]
        return head + tail, [0] * len(head) + [1] * len(tail)

    def _encode(self, text: str) -> list[int]:
        if self.preparation["tokenizer"] == "bytes":
            return list(text.encode())
        library = self._tokenizer()
        if self.preparation["tokenizer"] == "sentencepiece":
            return library.encode(text)
        return library.encode(text, add_special_tokens=False).ids

    def _tokenizer(self) -> Any:
        if self._library is not None:
            return self._library
        path = str(self.folder / self.preparation["file"])
        if self.preparation["tokenizer"] == "sentencepiece":
            import sentencepiece

            self._library = sentencepiece.SentencePieceProcessor(model_file=path)
        else:
            import tokenizers

            self._library = tokenizers.Tokenizer.from_file(path)
            self._library.no_padding()
            self._library.no_truncation()
        return self._library

    def _of_rows(self, rows: Any) -> dict[str, np.ndarray]:
        """The numbers and the ids of words of rows: dictionaries by column; or a data frame."""
        columns = json.loads((self.folder / self.preparation["file"]).read_text(encoding="utf-8"))
        if hasattr(rows, "to_dict"):
            rows = rows.to_dict("records")
        missing = set(columns["cells"]["missing"])
        numbers = [[number_of(row, each, missing) for each in columns["numbers"]] for row in rows]
        words = [[word_of(row, each, missing) for each in columns["words"]] for row in rows]
        return {"numbers": np.array(numbers, np.float64).astype(np.float32), "words": np.array(words, np.int32)}


def text_of(row: Any, column: str, missing: set[str]) -> str | None:
    """The cell of a column as text; None where it is missing. Raises SystemExit without the column."""
    if column not in row:
        raise SystemExit(f"a row lacks the column {column!r}; give it, with None where its value is not known")
    value = row[column]
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    try:
        if value is None or value != value:
            return None
    except TypeError:  # Of pandas.NA, which has no truth.
        return None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        value = int(value) if value == int(value) else value.normalize()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    text = str(value).strip()
    text = text.lower() if text.lower() in ("true", "false") else text
    return None if text in missing else text


def word_of(row: Any, column: dict[str, Any], missing: set[str]) -> int:
    """The id of a word."""
    text = text_of(row, column["column"], missing)
    return column["missing"] if text is None else column["ids"].get(text, column["unknown"])


def number_of(row: Any, column: dict[str, Any], missing: set[str]) -> float:
    """A number, or a part of a date; NaN where it is missing, or in a form that training rows had not."""
    text = text_of(row, column["column"], missing)
    if text is None:
        return math.nan
    given = row[column["column"]]
    if "pattern" in column:
        return date_part(text, column, given if isinstance(given, datetime.date) else None)
    if isinstance(given, int | float | np.number | np.bool_):
        return float(given) - column["offset"] if math.isfinite(given) else math.nan
    value = parse_number(text, column["style"])
    return math.nan if value is None else value - column["offset"]


def parse_number(text: str, style: str) -> float | None:
    """The number that a text writes in a style."""
    if style == "boolean":
        return TRUTHS.get(text.lower())
    if style == "comma" and (COMMA.fullmatch(text) or GROUPED["."].fullmatch(text)):
        text = text.replace(".", "").replace(",", ".")
    elif style == "groups" and GROUPED[","].fullmatch(text):
        text = text.replace(",", "")
    elif style == "comma" or not PLAIN.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def date_part(text: str, column: dict[str, Any], given: datetime.date | None = None) -> float:
    """A part of a date, such as "week sin"; times are in UTC where they name no zone. `given`: it came as a date."""
    found = re.fullmatch(column["pattern"], text)
    if found is not None:
        seconds = seconds_of(found.groupdict())
    elif given is not None:
        when = datetime.datetime.fromisoformat(given.isoformat())
        seconds = when.replace(tzinfo=when.tzinfo or datetime.UTC).timestamp()
    else:
        return math.nan
    if math.isnan(seconds):
        return math.nan
    days = seconds / 86400
    # A number with several parts is named `column (part)`.
    part = column["name"][len(column["column"]) + 2 : -1]
    if part == "day":
        return days - column["offset_days"]
    name, _, function = part.partition(" ")
    turn = {"year": days / 365.2425, "week": (days + 3) / 7, "hour": days}[name]
    return (math.sin if function == "sin" else math.cos)(2 * math.pi * (turn - math.floor(turn)))


def seconds_of(part: dict[str, str | None]) -> float:
    """Seconds since 1970 of what the pattern of a date has found; NaN for a date that there is not."""
    year, name, second = int(part["year"] or 0), part.get("name"), part["second"] or "0"
    if len(part["year"] or "") == 2:
        year += 1900 if year >= 70 else 2000
    month = int(part.get("month") or 0)
    if name is not None:
        month = next((number for number, start in enumerate(MONTHS, 1) if name.lower().startswith(start)), 0)
    hour, minute = int(part["hour"] or 0), int(part["minute"] or 0)
    try:
        day = datetime.date(year, month, int(part["day"] or 0))
    except ValueError:
        return math.nan
    if half := part["half"]:
        if not 1 <= hour <= 12:
            return math.nan
        hour = hour % 12 + (12 if half.lower().startswith("p") else 0)
    if hour > 24 or minute > 59 or float(second.replace(",", ".")) >= 61:
        return math.nan
    seconds = calendar.timegm(day.timetuple()) + 3600 * hour + 60 * minute + float(second.replace(",", "."))
    zone = part["zone"] or ""
    if zone[:1] in ("+", "-") and zone:
        away = 3600 * int(zone[1:3]) + 60 * int(zone[3:].lstrip(":") or 0)
        seconds -= away if zone[0] == "+" else -away
    return seconds


def rows_of_file(path: Path, cells: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a CSV, as training read it: the delimiter is the one that the line of names has most often."""
    utf8 = cells["encoding"].lower().replace("-", "").replace("_", "") == "utf8"
    with open(path, encoding="utf-8-sig" if utf8 else cells["encoding"], newline="") as file:
        head = re.sub(r'"[^"]*"', "", file.readline())
        file.seek(0)
        lines = csv.reader(file, delimiter=cells["delimiter"] or max(DELIMITERS, key=head.count))
        names = [name.strip() for name in next(lines, [])]
        rows = [dict(zip(names, line, strict=False)) for line in lines if line]
    if not rows:
        raise SystemExit(f"{path}: it has no rows")
    return rows


def main() -> None:
    """Predicts for files or texts, a line of JSON for each example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="photographs, or one file: CSV, or .npy or .npz with arrays")
    parser.add_argument("--text", action="append", default=[], help="a text; may be given several times")
    parser.add_argument("--runtime", choices=("onnx", "stablehlo"))
    given = parser.parse_args()
    predictor = Predictor(Path(__file__).parent, given.runtime)
    inputs: Any = given.text or given.files
    if not inputs:
        parser.error("give a file, or --text")
    if given.files and Path(given.files[0]).suffix in (".npy", ".npz"):
        loaded = np.load(given.files[0])
        inputs = loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    elif given.files and predictor.preparation["kind"] == "columns":
        cells = json.loads((predictor.folder / "columns.json").read_text(encoding="utf-8"))["cells"]
        inputs = rows_of_file(Path(given.files[0]), cells)
    elif given.files and predictor.preparation["kind"] not in ("columns", "images"):
        parser.error(f"{given.files[0]}: give .npy or .npz with arrays, or --text")
    outputs = predictor.probabilities(inputs)
    for name, row in zip(predictor.named(outputs), outputs.tolist(), strict=True):
        json.dump({"prediction": name if isinstance(name, str | int | float) else row, "outputs": row}, sys.stdout)
        print()


if __name__ == "__main__":
    main()
