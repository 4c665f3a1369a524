"""The notebooks: stored without outputs, and executed here from a copy of the repository's folders."""

import ast
import base64
import json
import math
import re
import shutil
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from runs import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert not cell.outputs, f"{path.name}: clear the outputs before it is stored"
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_imported_from_jaxdl_exists(path):
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    lines = "\n".join(line for cell in code for line in cell.splitlines() if not line.startswith(("%", "!")))
    if "jaxdl.spark" in lines:
        pytest.importorskip("pyspark")
    imports = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if str(node.module).split(".")[0] == "jaxdl":
            exec(ast.unparse(node))


def execute(path, folder, monkeypatch, smaller=()):
    """The notebook after a run in its folder of a copy, by the Python that runs the tests; cell id -> its outputs.

    `smaller` has pairs of texts of its code and what stands there instead, so that it trains for less long.
    """
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_PATH"):
        (folder / name).mkdir()
        monkeypatch.setenv(name, str(folder / name))
    for name in ("configs", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = folder / "JUPYTER_PATH" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    notebook = nbformat.read(folder / "notebooks" / path.name, as_version=4)
    for text, instead in smaller:
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
        assert cells, f"{path.name} has no {text!r}"
        for cell in cells:
            cell.source = cell.source.replace(text, instead)
    NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder / "notebooks")}}
    ).execute()
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def text_of(outputs):
    return "".join(output.get("text", "") for output in outputs)


def warnings_of(outputs):
    """What the cells write on stderr, but for the progress of what is slow on a busy machine."""
    written = [output for cell in outputs.values() for output in cell if output.get("name") == "stderr"]
    return [output for output in written if not output["text"].startswith("tokenizing: ")]


def assert_picture(outputs, min_bytes):
    [picture] = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    content = base64.b64decode(picture)
    assert content.startswith(b"\x89PNG")
    assert len(content) > min_bytes, "an empty figure"


@pytest.mark.slow
def test_quickstart(tmp_path, monkeypatch):
    smaller = [
        ("import jaxdl\n", "import jaxdl, jaxdl.models\njaxdl.models.ResNet.blocks = (1,)\n"),
        ('"epochs": 8, ', '"epochs": 5, "batch_size": 32, '),
    ]
    outputs = execute(ROOT / "notebooks" / "quickstart.ipynb", tmp_path, monkeypatch, smaller)
    assert "there is no such field" in text_of(outputs["mistake"])
    assert "{'replica': 2, 'fsdp': 4, 'tensor': 1}" in text_of(outputs["explain"])
    assert "bytes_per_device" in outputs["explain"][-1].data["text/html"]
    assert "eval/accuracy" in outputs["history-code"][-1].data["text/html"]
    assert_picture(outputs["plot"], 50_000)
    assert_picture(outputs["grid"], 10_000)
    [accuracy] = re.findall(r"accuracy (\S+) on 359 held-out digits", text_of(outputs["predict-code"]))
    assert float(accuracy) > 0.9
    assert "resumed from the checkpoint" in text_of(outputs["resume-code"])
    assert "+optimizer.momentum = 0.8" in text_of(outputs["resume-code"])
    assert "learning_rate=0.01 " in text_of(outputs["optimizer-code"])
    assert "kind='adamw'" in text_of(outputs["optimizer-code"])
    [reached] = re.findall(r"SGD, 8 epochs: (\S+)   AdamW, 3 epochs: (\S+)", text_of(outputs["optimizer-code"]))
    assert all(float(number) > 0.8 for number in reached)
    warnings = warnings_of(outputs)
    assert not warnings


@pytest.mark.slow
def test_exchange(tmp_path, monkeypatch):
    smaller = [
        ("sizes=(64, 256, 256, 10)", "sizes=(64, 68, 10)"),
        ("num_steps=150", "num_steps=100"),
        ('"jax_num_cpu_devices", 8', '"jax_num_cpu_devices", 4'),
        ("make_mesh((8,)", "make_mesh((4,)"),
    ]
    outputs = execute(ROOT / "notebooks" / "exchange.ipynb", tmp_path, monkeypatch, smaller)
    for name, min_bytes in (("select-plot", 30_000), ("step-plot", 50_000), ("cost-plot", 30_000)):
        assert_picture(outputs[name], min_bytes)

    [num_parameters] = re.findall(r"^(\d+) parameters", text_of(outputs["network-code"]))
    dense_bytes = 2 * 3 / 4 * 4 * int(num_parameters)
    table = outputs["collectives-code"][-1].data["text/plain"]
    assert re.search(rf"lax.psum\s+{dense_bytes:,.0f}\s+1.0\s", table)
    assert 40 < float(re.findall(r"1 % by all_gather\s+\S+\s+(\S+)", table)[0]) < 50
    [gap] = re.findall(r"contract: off by (\S+) at most", text_of(outputs["collectives-code"]))
    assert float(gap) < 1e-6

    trap = re.findall(r"pcast (\S+) +(\S+) bytes sent   norms on the 8 devices: (.*)", text_of(outputs["trap-code"]))
    assert [(cast, sent) for cast, sent, _ in trap] == [("False", f"{dense_bytes:,.0f}"), ("True", "0")]
    assert [len(set(norms.split(", "))) > 1 for *_, norms in trap] == [False, True]

    losses = re.findall(r"(top-k 1 %, no feedback|[^:,]+): ([\d.]+)", text_of(outputs["step-table"]).split(":", 1)[1])
    loss = {name.strip(): float(value) for name, value in losses}
    assert loss["top-k 1 %"] < 1.2 * loss["dense"]
    assert loss["top-k 1 %, no feedback"] > 1.5 * loss["top-k 1 %"]
    assert loss["8 bits"] == pytest.approx(loss["dense"], rel=0.05)

    advice = text_of(outputs["cost-code"])
    assert "25 Gb/s, 8 replicas: topk 0.01" in advice
    assert "1600 Gb/s, 8 replicas: dense" in advice
    assert "do not compress" in advice
    warnings = warnings_of(outputs)
    assert not warnings


@pytest.mark.slow
def test_own_model(tmp_path, monkeypatch):
    outputs = execute(ROOT / "notebooks" / "own_model.ipynb", tmp_path, monkeypatch, [('"epochs": 12', '"epochs": 8')])
    assert "stopped at step 100 of " in text_of(outputs["fit-code"])
    assert "resumed from the checkpoint at step 100" in text_of(outputs["resume-code"])
    for cell in ("fit-code", "resume-code"):
        assert_picture(outputs[cell], 20_000)
    [own, by_the_run] = re.findall(r"accuracy (\S+), by the run (\S+)", text_of(outputs["predict-code"]))[0]
    assert own == by_the_run
    [noisy] = re.findall(r"with noise (\S+)", text_of(outputs["predict-code"]))
    assert 0.5 < float(noisy) < float(own) > 0.85
    assert "(64, 64)" in text_of(outputs["restore-code"])
    warnings = warnings_of(outputs)
    assert not warnings


@pytest.mark.slow
@pytest.mark.long("a notebook trains twice in a process of its own")
def test_language_model(tmp_path, monkeypatch):
    smaller = [
        ('"2000000"', '"500000"'),
        ('"2000"', '"1000"'),
        ("num_layers=2", "num_layers=1"),
        ("steps=300", "steps=200"),
        ("paths=(library,)", 'paths=tuple(f"{library}/{name}" for name in ("asyncio", "json", "unittest"))'),
        ('"steps": 80', '"steps": 30'),
    ]
    outputs = execute(ROOT / "notebooks" / "language_model.ipynb", tmp_path, monkeypatch, smaller)
    assert "1,000 tokens, trained on 0.5 MB" in text_of(outputs["tokenizer-code"])
    assert "</s>" in text_of(outputs["data-code"])
    assert text_of(outputs["generate-code"]).count("'def __init__(self") == 1
    for cell in ("train-code", "look-plot"):
        assert_picture(outputs[cell], 10_000)
    [(before, after)] = re.findall(r"before (\S+), after (\S+)", text_of(outputs["before-code"]))
    [bytes_per_token] = re.findall(r"targets, (\S+) bytes a token", text_of(outputs["data-code"]))
    guessed = math.log2(1000) / float(bytes_per_token)
    assert float(after) < float(before) < 0.9 * guessed
    warnings = warnings_of(outputs)
    assert not warnings


@pytest.mark.slow
@pytest.mark.long("a notebook trains with every agreement in a process of its own")
def test_agreement(tmp_path, monkeypatch):
    smaller = [
        ("steps=320", "steps=160"),
        ("max_steps=200", "max_steps=100"),
        ("every_steps=20", "every_steps=40"),
        ("replica=8, fsdp=1, cpu_devices=8", "replica=4, fsdp=1, cpu_devices=4"),
    ]
    outputs = execute(ROOT / "notebooks" / "agreement.ipynb", tmp_path, monkeypatch, smaller)
    for cell in ("curves-code", "apart-code", "async-plot"):
        assert_picture(outputs[cell], 20_000)
    found = re.findall(r"^(.+): (\d+) bytes a step, accuracy (\S+)$", text_of(outputs["bytes-code"]), re.MULTILINE)
    sent = {name: int(num_bytes) for name, num_bytes, _ in found}
    accuracy = {name: float(value) for name, _, value in found}
    assert sent["local SGD"] == pytest.approx(sent["every step"] / 16, rel=0.01)
    assert sent["DiLoCo, 4 bits"] < sent["DiLoCo"] / 4
    assert min(value for name, value in accuracy.items() if name != "emulated staleness") > 0.9
    programs = text_of(outputs["none-code"])
    assert "a local step: nothing" in programs
    assert "its merge: ['all-reduce" in programs
    assert "bit-equal to the run that was not stopped: True" in text_of(outputs["resume-code"])
    merges = [int(number) for number in re.findall(r"for \w+(?: four)?: (\d+) merges", text_of(outputs["async-code"]))]
    assert merges[1] > 1.5 * merges[0]
    warnings = warnings_of(outputs)
    assert not warnings


@pytest.mark.slow
def test_recommendation(tmp_path, monkeypatch):
    smaller = [
        ("200_000", "50_000"),
        ("mesh=MeshConfig(replica=2, fsdp=4, cpu_devices=8)", "mesh=MeshConfig(replica=2, fsdp=2, cpu_devices=4)"),
        ('{"replica": 2, "fsdp": 4}', '{"replica": 2, "fsdp": 2}'),
        ("gpus_per_node=4", "gpus_per_node=2"),
        ("top=(64, 32)", "top=(32,)"),
        ("rows=(40_000, 8_000, 900, 30)", "rows=(4_000, 800, 90, 30)"),
        ('cache.fraction": 0.1, "embedding.cache.min_rows": 20', 'cache.fraction": 0.5, "embedding.cache.min_rows": 2'),
        ("test_examples=20_000", "test_examples=8_000"),
        ("splits.test.best(20_000)", "splits.test.best(8_000)"),
    ]
    outputs = execute(ROOT / "notebooks" / "recommendation.ipynb", tmp_path, monkeypatch, smaller)
    assert_picture(outputs["curve-code"], 10_000)
    sent = re.findall(r"^(.+): (\d+) bytes predicted, (\d+) counted$", text_of(outputs["schemes-code"]), re.MULTILINE)
    assert len(sent) == 6
    assert all(predicted == counted for _, predicted, counted in sent)
    found = {name: int(counted) for name, _, counted in sent}
    assert found["the plan"] <= min(found.values()) * 1.01
    one, other = map(float, re.findall(r"AUC (\S+), and (\S+) with", text_of(outputs["plan-code"]))[0])
    assert one == pytest.approx(other, abs=0.003)
    assert other > 0.6, "of 0.5 by chance"
    assert "the same loss to the last bit: True" in text_of(outputs["cache-code"])
    assert "predicted: [0." in text_of(outputs["predict-code"])
    assert not warnings_of(outputs)


@pytest.mark.slow
def test_classics(tmp_path, monkeypatch):
    outputs = execute(ROOT / "notebooks" / "classics.ipynb", tmp_path, monkeypatch)
    assert_picture(outputs["plot"], 20_000)
    found = re.findall(r"inertia (\S+) after (\d+) iterations", text_of(outputs["kmeans-code"]))
    assert len(found) == 3
    assert len(set(found)) == 1, "one device, eight devices and scikit-learn"
    table = text_of(outputs["table-code"])
    rows = re.findall(r"(\S+e-\d+)\s+(\S+e[+-]\d+)\s+(\S+e[+-]\d+)$", table, re.MULTILINE)
    assert len(rows) >= 10
    assert all(max(float(one), float(eight)) <= float(bound) for bound, one, eight in rows)
    accuracy = re.findall(r"accuracy (\S+) on", text_of(outputs["logistic-code"]))
    assert min(map(float, accuracy)) > 0.98
    assert not warnings_of(outputs)


@pytest.mark.slow
@pytest.mark.long("a notebook starts Spark")
def test_spark(tmp_path, monkeypatch):
    pytest.importorskip("pyspark", reason="needs pyspark and Java: pip install 'jaxdl[spark]'")
    outputs = execute(ROOT / "notebooks" / "spark.ipynb", tmp_path, monkeypatch)
    [accuracy] = re.findall(r"accuracy (\S+) on the rows", text_of(outputs["score-code"]))
    [of_features] = re.findall(r"stage3: accuracy (\S+)", text_of(outputs["features-code"]))
    assert min(float(accuracy), float(of_features)) > 0.9
    assert "'accuracy': " in text_of(outputs["fit-code"])
