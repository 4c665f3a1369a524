"""A fleet of real processes: runs are resized, a run and the server are killed, and every step is made once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import why_no_hosts

from jaxdl.platform.fleet.engine import LOST
from jaxdl.platform.fleet.engines import make_engine
from jaxdl.platform.fleet.store import Store

# It makes 150 steps, each a line of a file; the first of its hosts makes them. SIGTERM ends it between two steps.
WORKER = """
import os, signal, sys, time
nodes, path = sys.argv[1:]
if os.environ["JAX_PROCESS_ID"] == "0":
    going = True
    def stop(*_):
        global going
        going = False
    signal.signal(signal.SIGTERM, stop)
    with open(path, "a+") as file:
        file.seek(0)
        step = len(file.read().splitlines())
        while going and step < 150:
            file.write(f"{step} {nodes} {os.getppid()}\\n")
            file.flush()
            step += 1
            time.sleep(0.05)
    sys.exit(0 if step == 150 else 143)
"""


def serve(folder):
    words = ["serve", "--state", str(folder), "--nodes", "3", "--between-sec", "0", "--resized", "1"]
    command = [sys.executable, "-m", "jaxdl.fleet", *words, "--poll-sec", "0.1", "--until-idle"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, what, sec=60.0):
    end = time.monotonic() + sec
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_every_step_is_made_once_whatever_is_killed(tmp_path):
    folder, script = tmp_path / "fleet", tmp_path / "worker.py"
    script.write_text(WORKER)
    folder.mkdir()
    store, out = Store(folder), [tmp_path / f"steps{number}.txt" for number in range(2)]
    command = ["python", str(script), "{nodes}"]
    first = store.submit([*command, str(out[0])], [1, 2, 3])
    server = serve(folder)
    wait_for(lambda: len(lines(out[0])) > 5, "the first run makes steps")
    store.submit([*command, str(out[1])], [1, 2])
    wait_for(lambda: lines(out[1]), "the second run makes steps")
    server.send_signal(signal.SIGKILL)  # The runs go on.
    server.communicate()
    before = len(lines(out[1]))
    wait_for(lambda: len(lines(out[1])) > before, "a run outlives its server")
    server = serve(folder)
    attempts = folder / "runs" / first.name / "attempts"
    newest = max(attempts.iterdir(), key=lambda path: int(path.name))
    os.kill(json.loads((newest / "keeper.json").read_text())["pid"], signal.SIGKILL)
    said, _ = server.communicate(timeout=120)
    assert server.returncode == 0, said
    for path in out:
        steps = [int(line.split()[0]) for line in lines(path)]
        assert steps == list(range(150)), said
    assert {line.split()[1] for line in lines(out[0])} > {"3"}  # It had other sizes, too.
    view = store.view()
    assert [run["state"] for run in view["runs"]] == ["completed", "completed"]
    started = [event for event in map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
               if event["what"] == "started"]  # fmt: skip
    assert len({(event["run"], event["attempt"]) for event in started}) == len(started)
    assert Path(view["runs"][0]["workdir"]) == Path()


def test_emulated_nodes_have_links_of_their_rate_and_a_run_that_ignores_its_signal_is_killed(tmp_path):
    if why := why_no_hosts():
        pytest.skip(why)
    store, out = Store(tmp_path / "fleet"), tmp_path / "said"
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib, signal, socket, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "limit = subprocess.run(['tc', 'qdisc', 'show', 'dev', 'eth0'], capture_output=True, text=True).stdout\n"
        "pathlib.Path(sys.argv[1] + os.environ['JAX_PROCESS_ID']).write_text(socket.gethostname() + ' ' + limit)\n"
        "time.sleep(300)\n"
    )
    run = store.submit(["python", str(script), str(out)], [2])
    engine = make_engine("netns", store, 2, rate="50mbit")
    assert engine.start(run, 1, engine.nodes())
    said = [tmp_path / f"said{number}" for number in range(2)]
    wait_for(lambda: all(lines(path) for path in said), "both nodes say something")
    for number, path in enumerate(said):
        assert path.read_text().startswith(f"host{number} ")
        assert "rate 50Mbit" in path.read_text()
    engine.stop(run, 1)
    time.sleep(1.0)
    assert engine.poll(run, 1) is None
    assert engine.start(run, 2, engine.nodes()) is False
    engine.kill(run, 1)
    wait_for(lambda: engine.poll(run, 1) == LOST, "it is killed")


def test_a_command_whose_folder_is_gone_ends_with_a_code(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    store = Store(tmp_path / "fleet")
    run = store.submit(["true"], (1,))
    monkeypatch.chdir(tmp_path)
    folder.rmdir()
    engine = make_engine("local", store, 1)
    assert engine.start(run, 1, ["node0"])
    assert engine.poll(run, 1) == 2
    output = store.run_folder(run.name) / "attempts" / "1" / "output.txt"
    assert f"cannot be started in {folder}: No such file or directory" in output.read_text()


def test_a_detached_reaper_is_no_child_and_ends_what_a_killed_process_has_started(tmp_path):
    """As a worker of Ray ends, by SIGKILL for it and for its children, and not for theirs."""
    program = (
        "import subprocess, sys, time; from jaxdl.platform.launch.reaper import Reaper;"
        "reaper = Reaper(detached=True);"
        'run = \'import subprocess, time; print(subprocess.Popen(["sleep", "300"]).pid, flush=True); time.sleep(300)\';'
        "one = subprocess.Popen([sys.executable, '-c', run], start_new_session=True);"
        "reaper.watch(one.pid); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as ended:
        assert ended.stdout is not None
        worker = int(ended.stdout.readline())
        time.sleep(0.2)  # The watch follows the start.
        children = Path(f"/proc/{ended.pid}/task/{ended.pid}/children").read_text().split()
        assert len(children) == 1
        for pid in (*map(int, children), ended.pid):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not running(worker), "what it has started is killed")
