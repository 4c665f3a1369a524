"""The server of OpenAI's interface: what it writes, to whom, and what it refuses."""

import asyncio
import json
import random
import socket

import httpx
import numpy as np
import openai
import pytest
from mistakes import refusal
from serving import CONTEXT, QUEUE, SLOTS, Server, write_run

from jaxdl.inference.serve.__main__ import main
from jaxdl.inference.serve.answers import token_bytes, token_text

PROMPTS = ["1 f", "", "0 fish, re", "blue", "fish", "\u00e9\u00e9"]
GREEDY = {"temperature": 0, "max_tokens": 20}
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 20}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def server(workdir):
    with Server(workdir) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def completed(client, **options):
    return client.completions.create(model="tiny", **options)


def generated(server, prompt, *, max_tokens, **options):
    return "".join(server.predictor.generate(prompt, num_tokens=max_tokens, **options))


@pytest.mark.parametrize("options", [GREEDY, DRAWN, DRAWN | {"top_p": 0.5}])
def test_texts_are_those_of_generate(server, client, options):
    top_k = {"top_k": 7} if "top_p" in options else {}
    for prompt in PROMPTS[:4]:
        made = completed(client, prompt=prompt, **options, extra_body=top_k)
        assert made.choices[0].text == generated(server, prompt, **options, **top_k)
        streamed = list(completed(client, prompt=prompt, **options, extra_body=top_k, stream=True))
        assert "".join(piece.choices[0].text for piece in streamed) == made.choices[0].text
        assert [piece.choices[0].finish_reason for piece in streamed][-1] == made.choices[0].finish_reason == "length"
        assert made.usage.completion_tokens == 20
        assert made.usage.prompt_tokens == len(server.predictor.codec.prompt(prompt))


def test_several_prompts_and_texts_have_numbers_of_their_own(server, client):
    made = completed(client, prompt=PROMPTS[:2], n=2, **DRAWN)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in made.choices]
    assert texts[0] != texts[1], "two texts of one prompt are drawn by keys of their own"
    expected = list(server.predictor.complete(PROMPTS[:2], num_tokens=20, temperature=1.0, seed=5))
    assert [choice.text for choice in completed(client, prompt=PROMPTS[:2], **DRAWN).choices] == [
        one.text for one in expected
    ]
    as_tokens = completed(client, prompt=[list(b"1 f")], **GREEDY, echo=True)
    assert as_tokens.choices[0].text == "1 f" + generated(server, "1 f", **GREEDY)


def test_many_at_once_are_each_as_alone(server):
    requests = [
        {"model": "tiny", "prompt": PROMPTS[number % 6], "max_tokens": 5 + number, "temperature": number % 3 / 2,
         "seed": number, "top_p": 0.9 if number % 2 else 1, "stream": number % 5 == 0}
        for number in range(32)
    ]  # fmt: skip
    alone = [text_of(server.client.post("/v1/completions", json=request)) for request in requests]
    calls = server.num_calls

    async def all_at_once():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=request) for request in requests))

    together = [text_of(answer) for answer in asyncio.run(all_at_once())]
    assert together == alone
    assert len(set(alone)) > 20
    assert server.num_calls - calls < calls / 2, "texts are written side by side"
    assert server.engine.num_live == server.engine.num_waiting == 0


def text_of(answer):
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["text"]
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])


def test_stop_texts_and_tokens_end_a_text(server, client):
    whole = generated(server, "1 f", **GREEDY)
    made = completed(client, prompt="1 f", stop=whole[5:8], **GREEDY)
    end = whole.index(whole[5:8])
    assert (made.choices[0].text, made.choices[0].finish_reason) == (whole[:end], "stop")
    assert made.usage.completion_tokens == end + 3
    streamed = list(completed(client, prompt="1 f", stop=[whole[5:8]], **GREEDY, stream=True))
    assert "".join(piece.choices[0].text for piece in streamed) == whole[:end]
    token = whole.encode()[6]
    made = completed(client, prompt="1 f", **GREEDY, extra_body={"stop_token_ids": [token]})
    assert made.choices[0].text == whole[: whole.index(chr(token))]
    assert made.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_network(server, client):
    made = completed(client, prompt="1 f", **DRAWN | {"max_tokens": 6}, logprobs=2).choices[0]
    tokens = list(b"1 f")
    for name, logprob, top in zip(
        made.logprobs.tokens, made.logprobs.token_logprobs, made.logprobs.top_logprobs, strict=True
    ):
        logits = server.predictor.logits([tokens + [0] * (CONTEXT - len(tokens))])[0, len(tokens) - 1]
        expected = logits - np.log(np.exp(logits).sum())
        token = ord(name) if len(name) == 1 else int(name[-2:], 16)
        assert logprob == pytest.approx(expected[token], abs=1e-4)
        assert sorted(top.values(), reverse=True) == pytest.approx(sorted(expected)[:-3:-1], abs=1e-4)
        tokens.append(token)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "?"}], max_tokens=3, logprobs=True, top_logprobs=4
    )
    content = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [4] * len(content)
    assert chat.usage.completion_tokens in (len(content), len(content) + 1)


def test_a_conversation_is_answered_by_the_template(server, client):
    messages = [{"role": "user", "content": "fish?"}]
    prompt = server.predictor.chat_template.render(messages, add_generation_prompt=True)
    expected = completed(client, prompt=prompt, max_tokens=9, temperature=1, seed=3).choices[0].text
    options = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "temperature": 1, "seed": 3}
    made = client.chat.completions.create(**options)
    assert made.choices[0].message.content == expected
    assert made.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "fi"}, {"type": "text", "text": "sh?"}]}]
    streamed = list(
        client.chat.completions.create(
            **options | {"messages": parts}, stream=True, stream_options={"include_usage": True}
        )
    )
    assert streamed[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in streamed if piece.choices) == expected
    assert streamed[-1].choices == []
    assert streamed[-1].usage == made.usage
    assert streamed[-2].choices[0].finish_reason == made.choices[0].finish_reason


def test_what_is_known_of_the_server(server, client):
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
    assert server.client.get("/health").json() == {"status": "ok"}
    metrics = dict(
        line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines() if not line.startswith("#")
    )
    assert int(metrics["jaxdl_written_tokens_total"]) == server.engine.num_written
    assert int(metrics["jaxdl_requests_in_flight"]) == 1, "this one"
    assert int(metrics['jaxdl_answers_total{path="/health",status="200"}']) >= 1


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
        ("/v1/completions", {"presence_penalty": 0.5}, 400, "presence_penalty"),
        ("/v1/completions", {"logit_bias": {"1": 5}}, 400, "logit_bias"),
        ("/v1/completions", {"beams": 2}, 400, "beams: there is no such field here"),
        ("/v1/completions", {"stop": [""]}, 400, "stop: give at most 16 texts"),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, 400, "no effect without stream"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages: List should have at least 1 item"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "message 0 has no content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 99}]}, 400, "maximum context length"),
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
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    common = {
        "model": "tiny", "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "n": 1, "stop": ["x"],
        "seed": 1, "stream": False, "user": "me", "stop_token_ids": [3], "repetition_penalty": 1.1, "min_p": 0.1,
    }  # fmt: skip
    bodies = [
        ("/v1/completions", common | {"prompt": [[1, 2], [3]], "logprobs": 1, "echo": False}),
        ("/v1/chat/completions", common | {"messages": [message], "logprobs": True, "top_logprobs": 2}),
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


def sent(server, **body):
    """A socket on which a request has been sent, whose answer is not read."""
    content = json.dumps({"prompt": "1 f", "max_tokens": 60, "ignore_eos": True} | body).encode()
    connection = socket.create_connection(server.bound.getsockname())
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server, stream):
    written = server.engine.num_written
    with server.held():
        connections = [sent(server, stream=stream, n=SLOTS) for _ in range(2)]
        server.until(lambda: server.engine.num_live == SLOTS and server.engine.num_waiting == SLOTS)
        for connection in connections:
            connection.close()
        server.until(lambda: server.engine.num_waiting == 0)
        server.until(lambda: all(job.cancelled for job in server.engine._jobs))
    server.until(lambda: server.engine.num_live == 0)
    assert server.engine.num_written - written < 60 * SLOTS
    assert server.ask().status_code == 200


def test_more_than_may_wait_are_refused(server):
    with server.held():
        connections = [sent(server, n=SLOTS + QUEUE)]
        server.until(lambda: server.engine.num_waiting == QUEUE)
        answer = server.ask(model="tiny")
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert answer.headers["retry-after"] == "1"
        assert server.client.get("/health").status_code == 200
        for connection in connections:
            connection.close()
        server.until(lambda: server.engine.num_waiting == 0)
    assert server.ask().status_code == 200


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
                body = {"prompt": "1", "max_tokens": 3}
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3)))

        assert sorted(answer.status_code for answer in asyncio.run(three())) == [429, 503, 503]
    guarded.until(lambda: guarded.engine.num_live == 0)


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
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    said = refusal(capsys, "--workdir", str(workdir), run=main)
    assert "it needs the package uvicorn, which is not installed" in said
    assert "pip install 'jaxdl[serve]'" in said


class _Codec:
    """A tokenizer with bytes and a piece that begins a word."""

    is_bytes = False
    names = ("▁fish", "<0xE2>", "</s>")

    def decode(self, tokens):
        return "".join(("fish", "\ufffd", "</s>")[token] for token in tokens)

    def name(self, token):
        return self.names[token]


def test_tokens_have_names():
    codec = _Codec()
    assert [token_text(codec, token) for token in range(3)] == [" fish", "bytes:\\xe2", "</s>"]
    assert [token_bytes(codec, token) for token in range(3)] == [list(b" fish"), [0xE2], list(b"</s>")]
