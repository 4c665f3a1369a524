"""What a user writes in --setup, names and the command reaches the nodes unchanged: read by bash and a YAML parser."""

import ast
import io
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from job_files import CLUSTER_VARIABLES, NEEDED, job_file

from jaxdl.core.config import ConfigError
from jaxdl.platform.launch.jobs import COMMANDS
from jaxdl.platform.launch.jobs.setup import check_setup

ONE_NODE = ["--nodes", "1", "--gpus-per-node", "0"]
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 SLURMD_NODENAME=n0 "$@"
"""
PROBE = """#!/bin/bash
# Writes down its arguments, and what the lines before it left behind.
printf '%s\\0' "$SEEN" "$@" > "$RECORD"
"""


def expanded(text):
    """As Kubernetes expands a command without variables (third_party/forked/golang/expansion/expand.go)."""
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = out + "$", at + 2
        elif text[at + 1] == "(" and ")" in text[at + 2 :]:
            end = text.index(")", at)
            out, at = out + f"<the variable {text[at + 2 : end]}>", end + 1
        else:  # A byte of UTF-8 after $ would become a letter.
            out, at = out + text[at : at + 2].encode()[:2].decode("latin-1"), at + 2
    return out


def node_command(cluster, text):
    """What a node starts, as arguments."""
    if cluster == "slurm":
        return ["bash", "-c", text]
    if cluster == "ray":
        settings = {
            name: ast.literal_eval(node.value)
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in ("SETUP", "COMMAND")
        }
        return ["bash", "-c", settings["SETUP"] + "exec " + shlex.join(settings["COMMAND"])]
    read = yaml.safe_load(text)
    if cluster == "skypilot":
        return ["bash", "-c", read["run"]]
    pod = read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return [expanded(word) for word in pod["containers"][0]["command"]]


def run_node(cluster, folder, *options, words=()):
    """(exit code, stderr, what the probe has seen: None if it never ran)."""
    for name, program in {"srun": SRUN, "scontrol": "#!/bin/bash\necho n0\n", "probe": PROBE}.items():
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    on_cpus = {**NEEDED, "skypilot": []}
    text = job_file(cluster, *options, command=["probe", *words], size=ONE_NODE, needed=on_cpus)
    clean = {name: value for name, value in os.environ.items() if not CLUSTER_VARIABLES.match(name)}
    given = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n0", "SKYPILOT_NODE_IPS": "h"}
    given |= {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "RECORD": str(folder / "record")}
    given["PATH"] = f"{folder}:{os.environ['PATH']}"
    record = folder / "record"
    record.unlink(missing_ok=True)
    ended = subprocess.run(node_command(cluster, text), env=clean | given, capture_output=True, cwd=folder, timeout=30)
    seen = record.read_bytes().decode().split("\0")[:-1] if record.exists() else None
    return ended.returncode, ended.stderr.decode(), seen


SETUPS = {
    "export SEEN=yes": "yes",
    "export SEEN=yes  # many files": "yes",
    "export SEEN=yes  # a backslash \\": "yes",
    "# only a comment\nexport SEEN=1 # one\n\n# two\n": "1",
    "if true\nthen\n  export SEEN=then\nelse\n  export SEEN=else\nfi": "then",
    "if true; then\n  export SEEN=then; fi": "then",
    "case a in\na) export SEEN=a ;;\nesac": "a",
    "for x in 1 2\ndo SEEN=$SEEN$x\ndone\nexport SEEN": "12",
    "f() {\n  SEEN=f\n}\nf; export SEEN": "f",
    "export SEEN=1 \\\n  OTHER=2": "1",
    "export SEEN=1 \\": "1",
    "export SEEN=1 \\\n": "1",
    "export SEEN=1\ntrue &": "1",
    "export SEEN=1;": "1",
    "export SEEN=1\n:;\n": "1",
    "SEEN=$(cat <<EOF\n  a 'b \"c\n\nd  \nEOF\n)\nexport SEEN": "  a 'b \"c\n\nd  ",
    "SEEN=$(cat <<'end of it'\n$HOME `x`\nexec nothing\nend of it\n)\nexport SEEN": "$HOME `x`\nexec nothing",
    "\tread -r SEEN <<-X\n\ta b\n\tX\n\texport SEEN": "a b",
    "read -r SEEN <<< 'a # b'\nexport SEEN": "a # b",
    "set -e\nset -u\nset -o pipefail\nexport SEEN=1": "1",
    "set -- a b c\nexport SEEN=$#": "3",
    "export SEEN=$#": "0",
    "export SEEN='a\n\n   b  \nc'": "a\n\n   b  \nc",
    "export SEEN=\"it's '\\\"' \\$HOME \\`x\\` $((1 + 1))\"": "it's '\"' $HOME `x` 2",
    "x=$$; [[ $x == $$ && $x =~ ^[0-9]+$ ]] && export SEEN=pid": "pid",
    "export SEEN='$(JAX_PROCESS_ID) $$(A) $\u00e9 $'": "$(JAX_PROCESS_ID) $$(A) $\u00e9 $",
    "shopt -s extglob\ncase aa in\n+(a)) export SEEN=glob ;;\nesac": "glob",
    "exec 3>&1\nexec 2>> log &\nexport SEEN=1": "1",
    "export SEEN=1\r\n# from Windows\r\n": "1",
    "export SEEN='\U0001f600 \u2028\u0394\u00e9 \u200d'": "\U0001f600 \u2028\u0394\u00e9 \u200d",
    "export SEEN='a: b #c - [x] {y} %s %%'": "a: b #c - [x] {y} %s %%",
    "export SEEN=' - a'\n    : indented\n": " - a",
    "false\nexport SEEN=after": "after",
}  # fmt: skip


@pytest.mark.parametrize("cluster", COMMANDS)
def test_the_lines_of_setup_are_run_as_they_are(cluster, tmp_path):
    for setup, expected in SETUPS.items():
        code, said, seen = run_node(cluster, tmp_path, "--setup", setup, words=["a b", "c"])
        assert (code, seen) == (0, [expected, "a b", "c"]), (setup, said)


@pytest.mark.parametrize("cluster", COMMANDS)
@pytest.mark.parametrize(
    ("setup", "end"), [("exit", 2), ("true; exit 0 # done", 2), ("exit 7", 7), ("set -e\nfalse", 1)]
)
def test_a_job_whose_command_never_began_does_not_end_with_0(cluster, setup, end, tmp_path):
    code, said, seen = run_node(cluster, tmp_path, "--setup", setup)
    assert (code, seen) == (end, None)
    assert "The command of the job was not started" in said


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("if true", "bash cannot read it: line 2: syntax error: unexpected end of file"),
        ("fi", "syntax error near unexpected token"),
        ("echo 'a", "unexpected EOF while looking for matching"),
        ("echo $(", "unexpected EOF while looking for matching"),
        ("cat > x <<EOF\na", "here-document at line 1 delimited by end-of-file (wanted `EOF')"),
        ("foo &&", "syntax error"),
        ("exec ./mine.sh", "exec ./mine.sh replaces the shell"),
        ("cd x && exec python", "exec python replaces the shell"),
        ("cat <<EOF\nexec a\nEOF\nexec -a b c", "exec -a replaces the shell"),
        ("echo \x1b[1m", "the character '\\x1b' cannot be written into a job file"),
        ("echo \udcff", "the character '\\udcff' cannot be written into a job file"),
    ],
)
def test_setup_that_would_take_the_lines_after_it(setup, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_setup(setup)


def test_setup_without_lines():
    assert check_setup(None) is check_setup("") is check_setup(" \n\t\r\n") is None


TEXTS = (
    "", " ", "a b", "it's", '"', "'\"'", "\\", "\\n", "\\ud83d\\ude00", "$", "$$", "$HOME", "$(id)", "$$(X)", "${x}",
    "`id`", "$\u00e9", "#", "# a", "a #b", ": ", "a: b", "-", "- a", "--x=- ", "yes", "no", "null", "~", "true", "1",
    "1e3", "0x1f", "1:8", "2026-01-01", "{a: b}", "[a]", "*a", "&a", "!a", "|", ">", "%a", "@a", "=", "?", "a\u2028b",
    "a\u2029b", "\u00a0", "\ufeff", "\u00e9\u0394\u4e2d", "\U0001f600", "\U0001f469\u200d\U0001f4bb", "\ue000",
    "\ufffd", "\U00100000",
)  # fmt: skip


@pytest.mark.parametrize("setup", [(), ("--setup", "export SEEN=1")], ids=["plain", "setup"])
@pytest.mark.parametrize("cluster", COMMANDS)
def test_the_words_of_a_command_arrive_as_they_are(cluster, setup, tmp_path):
    code, said, seen = run_node(cluster, tmp_path, *setup, words=TEXTS)
    assert (code, said) == (0, "")
    assert seen is not None
    assert seen[1:] == list(TEXTS)


@pytest.mark.parametrize("name", ["yes", "no", "on", "n", "null", "true", "e1", "jaxdl"])
def test_names_stay_texts_in_yaml(name):
    read = yaml.safe_load(job_file("kubernetes", "--name", name, "--namespace", name, "--queue", name))
    assert [read["metadata"]["name"], read["metadata"]["namespace"], *read["metadata"]["labels"].values()] == [name] * 3
    assert f"'jobset.sigs.k8s.io/jobset-name': '{name}'" in str(read)
    read = yaml.safe_load(job_file("skypilot", "--name", name, "--gpu", "1", "--directory", f"./{name}: #"))
    assert (read["name"], read["workdir"], read["resources"]["accelerators"]) == (name, f"./{name}: #", "1:8")


def test_a_job_file_is_utf_8_on_any_terminal(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    COMMANDS["slurm"]([*ONE_NODE, "--", "echo", "\u0394\U0001f600"])
    assert "'\u0394\U0001f600'".encode() in out.getvalue()


def test_a_character_of_control_is_refused():
    with pytest.raises(ConfigError, match="cannot be written into a job file"):
        job_file("slurm", command=["probe", "a\x07"])
