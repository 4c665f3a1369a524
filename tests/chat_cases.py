"""Conversations of odd shapes, chat templates in the styles of four families, and a small tokenizer.

`scripts/record_chat_masks.py` recorded which of their tokens transformers takes for the assistant's.
"""

import json
import random
from pathlib import Path

RECORDED = Path(__file__).parent / "chat_masks.json"
NUM_CONVERSATIONS = 200
SHAPES = (
    "plain", "system", "tools", "empty answers", "two turns of one role", "too long", "odd text",
    "begins with an answer", "ends with a question", "thinking",
)  # fmt: skip
SPECIAL = (
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a place, today",
          "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}}]  # fmt: skip

# A template has G and E around what the assistant writes: nothing, or the blocks that mark it.
G, E = "@G@", "@E@"
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}@G@
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}@E@
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# As Qwen 3: what was thought is in the answers to the last question alone, so that a text is no prefix of a longer one.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}@G@
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}@E@
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today Date: ' + (date_string if date_string is defined else strftime_now('%d %b %Y')) + '\\n\\n' + system }}
{{- '<|eot_id|>' }}
{%- if tools %}
    {%- if messages | length == 0 %}
        {{- raise_exception('There is no first question for the tools') }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nYou may call: ' }}
    {{- tools | map(attribute='function') | list | tojson(indent=4) }}
    {{- '\\n\\n' + messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}@G@
        {%- if message.tool_calls %}
            {%- if message.tool_calls | length != 1 %}
                {{- raise_exception('This model takes one call at a time') }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
        {%- else %}
            {{- message['content'] | trim }}
        {%- endif %}
        {{- '<|eot_id|>' }}@E@
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if (message['role'] == 'assistant') %}
{{ '<start_of_turn>model\\n' }}@G@{{ message['content'] | trim + '<end_of_turn>' }}@E@{{ '\\n' }}
{% else %}
{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""
# Of the text that the lines of Gemma's template have between blocks nothing is left by trim_blocks and lstrip_blocks.
GEMMA = GEMMA.replace("}}\n", "}}{# #}\n")
# Tools and the system's text stand before the last question, so that a text with tools is no prefix of a longer one.
MISTRAL = """\
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST]' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['tool_calls'] %}@G@
        {{- '[TOOL_CALLS]' + (message.tool_calls | map(attribute='function') | list | tojson) + eos_token }}@E@
    {%- elif message['role'] == 'assistant' %}@G@
        {{- ' ' + message['content'] | trim + eos_token }}@E@
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + (message.content | tojson) + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
BOS = {"chatml": None, "thinking": None, "llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>"}
EOS = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>",
       "mistral": "</s>"}  # fmt: skip


def template(style, marked):
    """The template of a style, with the blocks that mark answers or without."""
    source = TEMPLATES[style]
    if style == "gemma":
        marks = ("{% generation %}", "{% endgeneration %}")
    else:
        marks = ("\n{%- generation %}", "\n{%- endgeneration %}")
    for place, mark in zip((G, E), marks, strict=True):
        source = source.replace(place, mark if marked else "")
    return source


def write_tokenizer(folder, style, marked=False):
    """Writes a tokenizer of a style: bytes, some pairs of which are tokens, and special tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = {byte: 256 + place for place, byte in enumerate(sorted({*range(256)} - {*shown}))}
    letters = [chr(hidden.get(byte, byte)) for byte in range(256)]
    space, newline = letters[32], letters[10]
    merges = [("t", "h"), ("th", "e"), (space, "the"), (space, "a"), ("a", "n"), ("an", "d"), (newline, newline),
              ("i", "s"), (space, "is"), ("e", "r"), (":", newline), (space, space), ("<", "t"),
              ("u", "s")]  # fmt: skip
    words = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": place, "content": word, "special": True} | flags for place, word in enumerate(SPECIAL)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {word: place for place, word in enumerate(words)},
                  "merges": [list(pair) for pair in merges], "dropout": None, "unk_token": None},
    }  # fmt: skip
    named = {"bos_token": BOS[style], "eos_token": EOS[style], "pad_token": "<pad>"}
    config = {name: token for name, token in named.items() if token is not None} | {
        "chat_template": template(style, marked), "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


WORDS = ("the", "answer", "is", "and", "island", "thunder", "42", "café", "naïve", "日本", "🙂", "then", "user", "x=1;")


def conversations():
    """Rows with "messages" and perhaps "tools", and the name of the shape of each."""
    draw = random.Random(43)

    def text(least=1, most=8):
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))

    def turns(count, **more):
        for _ in range(count):
            yield {"role": "user", "content": text()}
            yield {"role": "assistant", "content": text()} | more

    def tool_turns():
        for _ in range(draw.randint(1, 3)):
            function = {"name": "weather", "arguments": {"place": text(1, 2)}}
            yield {"role": "user", "content": text()}
            calls = [{"type": "function", "function": function}]
            yield {"role": "assistant", "content": draw.choice(["", text()]), "tool_calls": calls}
            yield {"role": "tool", "content": draw.choice(["12", text()])}
            yield {"role": "assistant", "content": text()}

    def odd(shape):
        messages = [*turns(draw.randint(1, 4))]
        if shape == "system":
            messages.insert(0, {"role": "system", "content": text()})
        elif shape == "tools":
            messages = [*tool_turns(), *turns(draw.randint(0, 1))]
        elif shape == "empty answers":
            messages += turns(1)
            messages[1]["content"] = draw.choice(["", " ", "\n"])
        elif shape == "two turns of one role":
            messages.insert(draw.choice([1, 2]), {"role": draw.choice(["user", "assistant"]), "content": text()})
        elif shape == "too long":
            messages = [*turns(draw.randint(12, 20))]
        elif shape == "odd text":
            extra = ("\n", "  ", "\n\n- a\n- b\n", "<|im_end|>", "Assistant:\n", "{{ x }}", "</s>", "\u2028", "\t")
            for message in messages:
                around = draw.choice(extra), draw.choice(extra)
                message["content"] = around[0] + message["content"] + around[1]
        elif shape == "begins with an answer":
            messages = [*messages[1:], *turns(1)]
        elif shape == "ends with a question":
            messages += [{"role": "user", "content": text()}]
        elif shape == "thinking":
            for message in messages[1::2]:
                message["content"] = f"<think>\n{text()}\n</think>\n\n{message['content']}"
        return messages

    rows = []
    for number in range(NUM_CONVERSATIONS):
        shape = SHAPES[number % len(SHAPES)]
        row = {"messages": odd(shape), "shape": shape}
        rows.append(row | ({"tools": TOOLS} if shape == "tools" else {}))
    return rows


def runs(mask):
    """The lengths of runs of equal values in a mask, the first of zeros."""
    lengths, value = [0], 0
    for entry in mask:
        if bool(entry) != bool(value):
            lengths.append(0)
            value = entry
        lengths[-1] += 1
    return lengths
