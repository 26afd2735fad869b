"""Chat templates: what they are given, what they may do, and errors that say whose fault it is."""

import json
from datetime import datetime

import pytest

from forerun.errors import InvalidRequestError, TokenizerError
from forerun.models.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def test_messages_become_a_prompt_that_ends_where_the_answer_begins():
    template = ChatTemplate(CHATML)
    assert template.render(HELLO) == "<user>hi\n<assistant>"
    assert template.render(HELLO, add_generation_prompt=False) == "<user>hi\n"
    assert template.available


def test_templates_see_special_tokens_and_extra_variables():
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ tools[0] }}", {"bos_token": "<s>"})
    assert template.render(HELLO, tools=["calculator"]) == "<s>hicalculator"


def test_blocks_are_trimmed_as_transformers_does():
    assert ChatTemplate("  {% if true %}\na\n  {% endif %}\nb").render(HELLO) == "a\nb"


def test_loops_can_be_left():
    assert (
        ChatTemplate("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render(HELLO)
        == "01"
    )


def test_training_marks_do_not_show():
    assert ChatTemplate("a{% generation %}{{ messages[0].content }}{% endgeneration %}b").render(HELLO) == "ahib"


def test_tojson_does_not_escape_for_html():
    source = "{{ messages[0].content | tojson }} {{ {'b': 1, 'a': 'é'} | tojson(indent=1) }}"
    text = ChatTemplate(source).render([{"role": "user", "content": "<'é'>"}])
    assert text == '"<\'é\'>" {\n "b": 1,\n "a": "é"\n}'


def test_the_date_is_available():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO) == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__['os'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source):
    with pytest.raises(InvalidRequestError, match=r"unsafe|not safely callable|too big"):
        ChatTemplate(source).render(HELLO)


def test_a_template_can_refuse_messages_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render(HELLO)


def test_an_error_while_rendering_is_the_requests():
    with pytest.raises(InvalidRequestError, match="chat template refused"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(HELLO)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% endfor %}", "{% nonsense %}", "{{ a | nofilter }}"])
def test_a_broken_template_is_the_models(source):
    with pytest.raises(TokenizerError, match="not valid jinja2"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hi", "must be a list"),
        (None, "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        ([], "is empty"),
        (["hi"], "message 0 must be an object"),
        ([{"content": "x"}], "message 0 needs a role"),
        ([{"role": 3, "content": "x"}], "message 0 needs a role"),
        ([*HELLO, {"role": "user"}], "message 1 needs a content"),
        ([{"role": "user", "content": 5}], "message 0 needs a content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; only text"),
        ([{"role": "user", "content": ["x"]}], "'str'; only text"),
    ],
)
def test_malformed_messages_are_bad_requests(messages, told):
    with pytest.raises(InvalidRequestError, match=told):
        ChatTemplate(CHATML).render(messages)


def test_text_parts_are_joined_and_tool_calls_need_no_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert (
        ChatTemplate(CHATML).render([{"role": "user", "content": parts}, call]) == "<user>ab\n<assistant>\n<assistant>"
    )


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate(CHATML).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_a_model_without_template_says_so():
    template = ChatTemplate(None)
    assert not template.available
    with pytest.raises(InvalidRequestError, match="no chat template"):
        template.render(HELLO)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", CHATML),
        ("chat_template.json", json.dumps({"chat_template": CHATML})),
        ("tokenizer_config.json", json.dumps({"chat_template": CHATML})),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]}),
        ),
    ],
)
def test_the_template_is_found_wherever_models_keep_it(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert ChatTemplate.from_directory(tmp_path).render(HELLO) == "<user>hi\n<assistant>"


def test_a_directory_without_template_has_none(tmp_path):
    assert not ChatTemplate.from_directory(tmp_path).available
