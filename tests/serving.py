"""A server of a tiny language model in this process, for the tests of `jaxdl.serve`."""

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import httpx
import jax

import jaxdl
from jaxdl.core.web.listening import bind
from jaxdl.data import TextFiles
from jaxdl.inference.serve.command import Serve, make_server
from jaxdl.inference.trained import parse_command, restore_network
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import LanguageModelling

CONTEXT, SLOTS, QUEUE = 64, 4, 40


def write_run(folder: Path) -> Path:
    """The workdir of a run of two steps on text as bytes."""
    files = folder / "files"
    files.mkdir()
    for number in range(2):
        (files / f"{number}.txt").write_text(f"{number} fish, red fish, blue fish\n" * 40, encoding="utf-8")
    experiment = Experiment(
        data=TextFiles(paths=(str(files),), glob="*.txt", length=CONTEXT, test_fraction=0.5),
        model=Transformer(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.02),
        batch_size=2,
        steps=2,
        mesh=MeshConfig(fsdp=1),
    )
    jaxdl.train(experiment, folder / "tiny", quiet=True, devices=jax.devices()[:1])
    return folder / "tiny"


class Server:
    """A server that listens; `hold` keeps its engine from writing."""

    def __init__(self, workdir: Path, *options: str, tokens: tuple[str, ...] = ()) -> None:
        args = ["--workdir", str(workdir), "--no-warm-up", "--slots", str(SLOTS), "--queue", str(QUEUE), *options]
        command = parse_command(Serve, args, "serve")
        self.bound: socket.socket = bind("127.0.0.1", 0)
        self.predictor = restore_network(command, args)
        self.server, self.engine = make_server(command, self.predictor, self.bound, tokens)
        self.url = f"http://127.0.0.1:{self.bound.getsockname()[1]}"
        self._may_write = threading.Event()
        self._may_write.set()
        write = self.engine._programs.write
        self.num_calls = 0

        def gated(*args):
            self._may_write.wait()
            self.num_calls += 1
            return write(*args)

        self.engine._programs.write = gated
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.bound])))

    def __enter__(self):
        self.engine.start()
        self._thread.start()
        self.until(lambda: self.server.started)
        self.client = httpx.Client(base_url=self.url, timeout=120)
        return self

    def __exit__(self, *_):
        self.client.close()
        self._may_write.set()
        self.server.should_exit = True
        self._thread.join()
        self.engine.stop()
        self.bound.close()

    @contextlib.contextmanager
    def held(self):
        """Context in which no text goes on after its first token."""
        self._may_write.clear()
        try:
            yield
        finally:
            self._may_write.set()

    def until(self, reached, seconds=60):
        """Waits until a condition is reached."""
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, "it was not reached"
            time.sleep(0.01)

    def ask(self, path="/v1/completions", **body):
        """The answer to a request."""
        return self.client.post(path, json={"prompt": "1 f", "max_tokens": 4, "ignore_eos": True} | body)
