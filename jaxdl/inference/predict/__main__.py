"""The command line: `python -m jaxdl.predict --workdir runs/flowers photo.jpg`."""

from __future__ import annotations

from jaxdl.inference.front import front

main = front("jaxdl.inference.predict.command", "python -m jaxdl.predict")


if __name__ == "__main__":
    main()
