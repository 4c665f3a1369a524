"""Lists what can be started here: the modules with a command line, and the first line of what each says of itself."""

from __future__ import annotations

import ast

from benchmarks import ROOT


def main() -> None:
    """Prints the list."""
    folder = ROOT / "benchmarks"
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nif __name__ ==" in text and path.name != "__main__.py":
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            print(f"python -m {module}\n    {str(ast.get_docstring(ast.parse(text))).splitlines()[0]}")


if __name__ == "__main__":
    main()
