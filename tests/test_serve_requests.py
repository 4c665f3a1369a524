"""What the server of OpenAI's interface refuses: requests, clients, and its own command line."""

import asyncio
import json
import random
import sys

import httpx
import openai
import pytest
from mistakes import refusal
from serving import CONTEXT, QUEUE, SLOTS, Server, write_run

from jaxdl.inference.serve.__main__ import main

ASKED = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def server(workdir):
    with Server(workdir) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"model": "other"}, 404, "The model 'other' does not exist"),
        ("/v1/completions", {"max_tokens": CONTEXT}, 400, "maximum context length is 64 tokens. The prompt has 3, and"),
        ("/v1/completions", {"prompt": "a" * CONTEXT}, 400, "maximum context length is 64 tokens"),
        ("/v1/completions", {"prompt": [1, 256]}, 400, "prompt: there is no token 256"),
        ("/v1/completions", {"prompt": [[]]}, 400, "prompt: give a text, a list of texts"),
        ("/v1/completions", {"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ("/v1/completions", {"temperature": "1"}, 400, "temperature: Input should be a valid number"),
        ("/v1/completions", {"n": SLOTS + QUEUE + 1}, 400, "45 texts are asked for; this server takes 44"),
        ("/v1/completions", {"best_of": 2}, 400, "best_of: texts are not ranked here"),
        ("/v1/completions", {"presence_penalty": 2.5}, 400, "presence_penalty: Input should be less than or equal"),
        ("/v1/completions", {"frequency_penalty": "1"}, 400, "frequency_penalty: Input should be a valid number"),
        ("/v1/completions", {"logit_bias": {"1": 5}}, 400, "logit_bias"),
        ("/v1/completions", {"beams": 2}, 400, "beams: there is no such field here"),
        ("/v1/completions", {"stop": [""]}, 400, "stop: give at most 16 texts"),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, 400, "no effect without stream"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages: List should have at least 1 item"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "message 0 has no content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 99}]}, 400, "maximum context length"),
        ("/v1/chat/completions", ASKED | {"tools": [TOOL]}, 400, "the chat template of tiny does not read them"),
        ("/v1/chat/completions", ASKED | {"tools": [{"type": "web"}]}, 400, "tools.0.type: Input should be 'function'"),
        ("/v1/chat/completions", ASKED | {"tool_choice": "required"}, 400, "tool_choice: Input should be 'none' or"),
        ("/v1/chat/completions", ASKED | {"tools": [TOOL], "parallel_tool_calls": False}, 400, "parallel_tool_calls:"),
        ("/v1/chat/completions", ASKED | {"functions": []}, 400, "functions: there is no such field here"),
        ("/v1/chat/completions", ASKED | {"response_format": {"type": "json_object"}}, 400, "response_format.type: In"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "name of a function"),
        ("/v1/nowhere", {}, 404, "There is no /v1/nowhere here"),
        ("/health", {}, 405, "POST: not for this path"),
    ],
)
def test_refusals_have_the_form_of_openai(server, path, body, status, message):
    body = {"prompt": "1 f"} | body if path == "/v1/completions" else body
    answer = server.client.post(path, json=body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_bodies_that_are_no_requests(server):
    def status(**options):
        answer = server.client.post("/v1/completions", **options)
        assert answer.json()["error"]["message"]
        return answer.status_code

    as_json = {"Content-Type": "application/json"}
    assert status(content=b"{", headers=as_json) == 400
    assert status(content=b"[" * 100_000, headers=as_json) == 400
    assert status(content=b'{"prompt": "\\ud800"}', headers=as_json) == 400
    assert status(content=b'{"prompt": NaN}', headers=as_json) == 400
    assert status(content=b"\xff\xfe", headers=as_json) == 400
    assert status(content=b'{"prompt": "a"}') == 415
    assert status(content=b'{"prompt": "' + b"a" * 5_000_000, headers=as_json) == 413
    assert status(content=b"7", headers=as_json) == 400


def mutated(random, value):
    """A JSON value with something else in some place."""
    odd = [None, True, -1, 0, 2**70, 1.5, 1e400, "", "a", "\0", [], [[]], {}, {"a": 1}, [None], ["a", 1], "\ud800"]
    if isinstance(value, dict) and value and random.random() < 0.8:
        name = random.choice(list(value))
        return {**value, name: mutated(random, value[name])}
    if isinstance(value, list) and value and random.random() < 0.8:
        return [*value[1:], mutated(random, value[0])]
    return random.choice(odd)


def test_no_body_makes_the_server_fail(server, capfd):
    chooser = random.Random(0)
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [CALL]}
    common = {
        "model": "tiny", "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "n": 1, "stop": ["x"],
        "seed": 1, "stream": False, "user": "me", "stop_token_ids": [3], "repetition_penalty": 1.1, "min_p": 0.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    bodies = [
        ("/v1/completions", common | {"prompt": [[1, 2], [3]], "logprobs": 1, "echo": False}),
        (
            "/v1/chat/completions",
            common
            | {"messages": [message], "logprobs": True, "top_logprobs": 2, "tools": [TOOL], "tool_choice": "none"},
        ),
    ]
    statuses = set()
    for number in range(300):
        path, body = bodies[number % 2]
        for _ in range(chooser.randint(1, 3)):
            body = mutated(chooser, body) if isinstance(body, dict) else body
        answer = server.client.post(
            path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        statuses.add(answer.status_code)
        assert ("error" in answer.json()) == (answer.status_code != 200), body
    assert statuses == {200, 400, 404}
    assert "Traceback" not in capfd.readouterr().err
    assert server.engine.num_live == server.engine.num_waiting == 0


@pytest.fixture(scope="module")
def guarded(workdir):
    options = ["--timeout-sec", "0.5", "--max-requests", "2", "--exact", "--max-tokens", "30", "--name", "fish"]
    with Server(workdir, *options, tokens=("first-token", "other-token")) as server:
        yield server


def test_a_token_is_needed(guarded, capfd):
    for header in ("", "Bearer first", "Bearer", "Basic first-token", "Bearer first-tokenx"):
        answer = guarded.client.get("/v1/models", headers={"Authorization": header})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "first-token" not in answer.text
    assert guarded.ask().status_code == 401
    assert guarded.client.get("/metrics").status_code == 401
    assert guarded.client.get("/health").status_code == 200
    for token in ("first-token", "other-token"):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=token, max_retries=0) as client:
            assert client.models.list().data[0].id == "fish"
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong-token", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    assert "token" not in "".join(capfd.readouterr())


def test_limits_of_requests(guarded):
    guarded.client.headers["Authorization"] = "Bearer first-token"
    assert "at most 30 tokens" in guarded.ask(max_tokens=31).json()["error"]["message"]
    with guarded.held():
        answer = guarded.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
        streamed = guarded.ask(stream=True)
        assert streamed.status_code == 200
        assert json.loads(streamed.text.split("\n\n")[-2][6:])["error"]["code"] == "timeout"

        async def three():
            async with httpx.AsyncClient(base_url=guarded.url, headers=guarded.client.headers) as client:
                body = {"prompt": "1", "max_tokens": 3, "ignore_eos": True}
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3)))

        assert sorted(answer.status_code for answer in asyncio.run(three())) == [429, 503, 503]
    guarded.until(lambda: guarded.engine.num_live == 0)


def test_an_error_of_the_device_ends_the_server(workdir, capfd):
    with Server(workdir) as server:

        def fail(*_):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        server.engine._programs.write = fail
        answer = server.ask(max_tokens=9)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert "RESOURCE_EXHAUSTED" in server.engine.failure
        server.until(lambda: server.server.should_exit)
        assert server.engine.num_live == 1, "its text was being written"
    assert "out of memory" not in answer.text
    assert "RESOURCE_EXHAUSTED: out of memory" in capfd.readouterr().err


def test_exact_texts_do_not_depend_on_others_bit_for_bit(guarded):
    """The log-probabilities too, which show each rounding."""
    guarded.client.headers["Authorization"] = "Bearer first-token"
    assert guarded.engine._programs.sizes == [SLOTS]

    def logprobs(n):
        answer = guarded.ask(n=n, temperature=1, seed=9, logprobs=3, max_tokens=9, ignore_eos=True)
        return answer.json()["choices"][0]["logprobs"]

    assert logprobs(1) == logprobs(SLOTS)


def test_another_site_cannot_use_a_server_of_this_machine(server):
    assert server.client.get("/health", headers={"Host": "evil.example"}).status_code == 403
    assert server.client.get("/health", headers={"Host": "LOCALHOST:80"}).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines reach it, and no token protects it"),
        (["--port", "70000"], "--port 70000: give a number from 0 to 65535"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid:"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000:"),
        (["--slots", "0"], "--slots 0: give a whole number, 1 or more"),
        (["--queue", "-1"], "--queue -1: give a whole number, 0 or more"),
        (["--timeout-sec", "0"], "--timeout-sec 0.0: give a number of seconds"),
        (["--port", "0", "--context", "65"], "--context 65: the network reads 64 tokens at a time"),
        (["--port", "0", "--slots", "1000000000"], "the key-value cache of 1000000000 slots"),
        (["--token-file", "FOLDER/none"], "--token-file FOLDER/none: No such file"),
        (["--token-file", "FOLDER/empty"], "--token-file FOLDER/empty: it has no token"),
        (["--token-file", "FOLDER/short"], "--token-file FOLDER/short: line 2 is no token"),
        (["--token-file", "FOLDER/good", "--without-token"], "--without-token: there is a token too"),
    ],
)
def test_mistakes_of_the_command(workdir, tmp_path, capsys, options, message):
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    (tmp_path / "short").write_text("long-enough\nsecret\n", encoding="utf-8")
    (tmp_path / "good").write_text("long-enough\n", encoding="utf-8")
    options = [one.replace("FOLDER", str(tmp_path)) for one in options]
    said = refusal(capsys, "--workdir", str(workdir), *options, run=main)
    assert message.replace("FOLDER", str(tmp_path)) in said
    assert "secret" not in said


def test_a_missing_package_is_named(workdir, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = refusal(capsys, "--workdir", str(workdir), run=main)
    assert "it needs the package uvicorn, which is not installed" in said
    assert "pip install 'jaxdl[serve]'" in said
