"""`jaxdl --print-completion bash`: what bash completes with the script, as bash itself says."""

import shlex
import subprocess

import pytest
from mistakes import refusal

from jaxdl.__main__ import COMMANDS, main
from jaxdl.core.kinds import choices
from jaxdl.training.experiment import Experiment


@pytest.fixture(scope="module")
def script():
    """The text of the script."""
    from jaxdl.training.completion import script

    return script(["bash"], list(COMMANDS))


def completed(script, *words):
    """What bash offers for the last of these words."""
    line = shlex.join(words)
    asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _jaxdl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    command = ["bash", "-u", "-c", f"{script}\n{asked}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert not found.stderr
    return found.stdout.split()


def test_what_bash_completes(script):
    assert completed(script, "jaxdl", "") == list(COMMANDS)
    assert completed(script, "jaxdl", "tr") == ["train", "translate"]
    kinds = choices(Experiment)
    assert completed(script, "jaxdl", "train", "--optimizer", "") == list(kinds["optimizer"])
    assert completed(script, "jaxdl", "train", "--optimizer", "la") == [
        name for name in kinds["optimizer"] if name.startswith("la")
    ]
    assert completed(script, "jaxdl", "train", "--report.trackers", "ml") == ["mlflow"]
    assert completed(script, "jaxdl", "train", "--report.trackers.ml") == [
        f"--report.trackers.mlflow.{one}"
        for one in ("name", "tags", "wait-sec", "uri", "experiment", "log-model", "no-log-model", "register-as")
    ]
    assert completed(script, "jaxdl", "train", "--optimizer.trust-c") == ["--optimizer.trust-coefficient"]
    assert completed(script, "jaxdl", "train", "--init-step", "") == ["newest", "best"]
    assert completed(script, "jaxdl", "train", "--config", "digi") == ["digits"]
    assert completed(script, "jaxdl", "train", "--expl") == ["--explain"]
    assert "--batch-size" in completed(script, "jaxdl", "train", "--explain", "")


def test_other_shells(script, capsys):
    main(["--print-completion", "zsh"])
    of_zsh = capsys.readouterr().out.splitlines()
    assert of_zsh[2:] == script.splitlines()[1:], "the same, after a line that lets zsh read it"
    assert of_zsh[1].endswith("&& bashcompinit")
    assert "give --print-completion bash, or zsh" in refusal(capsys, "--print-completion", "fish", run=main)
