"""Text: the checkpoint's own tokenizer and template, characters once they are whole, and stop strings."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.serving.text import StopStrings, Text
from nxpipe.pipeline.util.errors import InputInvalid, ModelSourceError
from tests.serving import checkpoints
from tests.serving.checkpoints import TEMPLATE, tokenizer

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello <|user|> world"},
    {"role": "assistant", "content": "hi\n"},
    {"role": "user", "content": "how are you?"},
]
# Forms that published templates have.
TEMPLATES = {
    "plain": TEMPLATE,
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content'] %}\n"
    "    {%- set loop_messages = messages[1:] %}\n{%- else %}\n    {%- set loop_messages = messages %}\n{%- endif %}\n"
    "{%- for message in loop_messages %}\n    {%- if loop.first and system is defined %}\n"
    "        {{- '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}\n"
    "    {%- elif message['role'] == 'user' %}\n        {{- '[INST] ' + message['content'] + '[/INST]' }}\n"
    "    {%- else %}\n        {{- ' ' + message['content']|trim + eos_token }}\n    {%- endif %}\n{%- endfor %}\n",
    "namespace": "{%- set ns = namespace(count=0) %}{%- for m in messages %}{%- set ns.count = ns.count + 1 %}"
    "{{ ns.count }}:{{ m.content | tojson }};{%- if loop.last %}{% break %}{% endif %}{%- endfor %}",
}


def text_with(files: dict[str, Any]) -> Text:
    encoded = {
        path: each.encode() if isinstance(each, str) else json.dumps(each).encode() for path, each in files.items()
    }
    return Text("tiny", {"tokenizer.json": tokenizer().to_str().encode(), **encoded})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text("tiny", checkpoints.files(checkpoints.write(tmp_path_factory.mktemp("model") / "tiny", "llama")))


@pytest.mark.sample(4)
@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_reads_as_transformers_renders_it(name: str, reply: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    own = text_with({"tokenizer_config.json": {**special, "chat_template": TEMPLATES[name]}})
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=TEMPLATES[name], **special)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=reply)
    assert own.chat_text(MESSAGES, reply=reply) == expected
    assert own.decode(own.chat(MESSAGES, reply=reply)) == own.decode(
        theirs(expected, add_special_tokens=False)["input_ids"]
    )


def test_a_template_comes_from_each_place_where_checkpoints_have_it() -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    for files in (
        {"chat_template.jinja": "yes"},
        {"chat_template.json": {"chat_template": "yes"}},
        {"tokenizer_config.json": {"chat_template": "yes"}},
        {"tokenizer_config.json": {"chat_template": named}},
        {"tokenizer_config.json": {"chat_template": "no"}, "chat_template.jinja": "yes"},
    ):
        assert text_with(files).chat_text(MESSAGES) == "yes"
    with pytest.raises(InputInvalid, match="no chat template; use completions"):
        text_with({}).chat_text(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[99].content }}",
        "{% for %}",
        "{{ messages | no_such_filter }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_an_error_of_the_request(template: str) -> None:
    with pytest.raises(InputInvalid, match="the chat template of tiny refuses them"):
        text_with({"chat_template.jinja": template}).chat_text(MESSAGES)


def test_without_a_tokenizer_the_sentence_says_what_to_save() -> None:
    with pytest.raises(ModelSourceError, match="save the tokenizer beside the model with save_pretrained"):
        Text("tiny", {}).encode("hello")
    with pytest.raises(ModelSourceError, match=r"tokenizer.json cannot be read"):
        Text("tiny", {"tokenizer.json": b"{}"})


@given(st.text(max_size=40))
def test_the_parts_of_a_stream_are_the_text_of_all_tokens(words: str) -> None:
    own = text_with({})
    tokens = own.encode(words, special=False)
    stream = own.stream()
    parts = [stream.add(token) for token in tokens]
    assert "".join(parts) == own.decode(tokens)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts if "\N{REPLACEMENT CHARACTER}" not in words)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_string_wherever_it_is_cut(
    words: str, stop: list[str], data: st.DataObject
) -> None:
    places = [place for each in stop if (place := words.find(each)) >= 0]
    found, watcher, start = "", StopStrings(stop), 0
    stopped = False
    while start < len(words) and not stopped:
        end = data.draw(st.integers(start + 1, len(words)))
        part, stopped = watcher.add(words[start:end])
        found, start = found + part, end
    assert stopped == bool(places)
    if stopped:
        assert words.startswith(found)
        assert any(words[len(found) :].startswith(each) for each in stop)
    else:
        assert found + watcher.end() == words
