"""What Orbax leaves behind after a failed read or write is not printed; that of others is."""

import gc
import sys

import pytest

from jaxdl.training.checkpoint.orbax_logs import hush_orbax

READ = """
async def read(never):
    try:
        await never
    except GeneratorExit as error:
        raise OSError("a page of text") from error
"""


class Never:
    def __await__(self):
        yield


@pytest.mark.parametrize(("module", "shown"), [("orbax/checkpoint/reading.py", []), ("mine/reading.py", ["read"])])
def test_a_read_that_is_abandoned(module, shown, monkeypatch):
    """Python destroys a coroutine that nothing awaits, and reports what that raises; after one of 60 that was 64 KB."""
    seen, scope = [], {}
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.object.__name__))
    hush_orbax()
    exec(compile(READ, f"/packages/{module}", "exec"), scope)
    reading = scope["read"](Never())
    reading.send(None)
    del reading
    gc.collect(0)
    assert seen == shown
