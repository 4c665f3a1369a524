"""Paragraphs of the docstrings of installed packages, labelled with the package: data for classifiers of texts.

python -m benchmarks.package_texts FOLDER writes FOLDER/train.csv and FOLDER/test.csv. A package's files are divided, so
that no file has paragraphs in both; a paragraph that several packages have is left out. Packages are not imported.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "scipy", "sklearn", "matplotlib", "jax", "flax", "optax", "pyspark", "pandas", "networkx")
_LEAST, _MOST = 40, 600
"""Characters of a paragraph."""
_MOST_OF_PACKAGE = 3000


def paragraphs(path: Path) -> Iterator[str]:
    """The paragraphs of prose in the docstrings of a file, in their order."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
            text = " ".join(block.split())
            if _LEAST <= len(text) <= _MOST and not re.search(r">>>|::|---|===|^\W|\|", text):
                yield text


def rows_of(package: str) -> dict[str, bool]:
    """Paragraph -> whether it is held out, by the file in which it stands first."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    root, found = Path(spec.origin).parent, {}
    for path in sorted(root.rglob("*.py")):
        held_out = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()[0] < 51  # A fifth.
        for text in paragraphs(path):
            found.setdefault(text, held_out)
    chosen = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())[:_MOST_OF_PACKAGE]
    return {text: found[text] for text in chosen}


def main() -> None:
    """Writes the two files; prints how many paragraphs each package has."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    by_package = {package: rows for package in PACKAGES if (rows := rows_of(package))}
    owners = defaultdict(set)
    for package, rows in by_package.items():
        for text in rows:
            owners[text].add(package)
    for split, held_out in (("train", False), ("test", True)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            for package, rows in by_package.items():
                for text, held in rows.items():
                    # A name of the package would say all.
                    if held == held_out and len(owners[text]) == 1 and package not in text.lower():
                        writer.writerow((text, package))
    print({package: len(rows) for package, rows in by_package.items()})


if __name__ == "__main__":
    main()
