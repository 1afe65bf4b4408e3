"""What chat templates get of a request: the chat that transformers renders for the same objects."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.errors import InvalidRequest
from router.api.chat_fields import ChatFields
from router.text.tokenization import Tokenization
from tests.support.tokenizers import byte_fallback, byte_level

# As templates of Hermes, Qwen and Mistral ask: is there a content, what are the arguments.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is not none %}{{ message.content }}{% else %}(none){% endif %}
{%- if message.tool_calls is defined %}
{%- for call in message.tool_calls %}
{{- '\\n<call>' + call.function.name }}
{%- if call.function.arguments is mapping %}
{%- for name, value in call.function.arguments.items() %}{{ ' ' + name + '=' + (value | tojson) }}{% endfor %}
{%- else %}{{ ' as written: ' + call.function.arguments }}{% endif %}
{%- endfor %}{% endif %}
{%- if message.name is defined %}{{ ' by ' + message.name }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""


# As gpt-oss's, and DeepSeek's with tools, ask.
DEMANDING = """{%- if messages[0].role in ['system', 'developer'] %}
{{- 'S:' + messages[0].content + ';' }}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for tool in tools or [] %}
{{- tool.function.name + ' // ' + tool.function.description + (tool.function.parameters | tojson) + ';' }}
{%- for name in tool.function.parameters.properties.keys() %}{{ name }}{% endfor %}
{%- endfor %}
{%- for message in rest %}
{%- if message.tool_calls is defined and message.content and message.thinking %}
{{- raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if message.role == 'assistant' %}{{ 'A:' + message.thinking + '|' + message.content + ';' }}
{%- elif message.role == 'user' %}{{ 'U:' + message.content + ';' }}{% endif %}
{%- endfor %}"""
USER = {"role": "user", "content": "Hi"}


def model(tmp_path: Path, template: str = TEMPLATE) -> Path:
    path = byte_level(tmp_path)
    (path / "chat_template.jinja").write_text(template)
    return path


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


def rendered(path: Path, messages: list[dict[str, Any]]) -> str:
    return Tokenization(path).render_chat(ChatFields().make_chat(messages))


def test_arguments_of_tool_calls_are_objects_for_templates(tmp_path: Path) -> None:
    path = model(tmp_path)
    given = {"a": 1, "b": [1.5, None, True], "c": {"é": "東 <"}}
    as_object = [{"role": "user", "content": "x"}, call(given)]
    as_text = [{"role": "user", "content": "x"}, call(json.dumps(given))]
    want = AutoTokenizer.from_pretrained(path).apply_chat_template(as_object, tokenize=False)
    want = want.replace("assistant\n", "assistant\n(none)")  # transformers leaves out what is None
    before = copy.deepcopy(as_text)
    assert rendered(path, as_text) == rendered(path, as_object) == want
    assert ' a=1 b=[1.5, null, true] c={"é": "東 <"}' in want
    assert as_text == before  # what a request brings is not changed


@pytest.mark.parametrize(
    "written", ["'<args>' + call['function']['arguments'] + '</args>'", "'<args>' ~ call.function.arguments"]
)
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_arguments_are_json_for_templates_that_join_them(
    tmp_path: Path, written: str, arguments: Any
) -> None:
    template = "{% for call in messages[1].tool_calls %}{{ WRITTEN }}{% endfor %}".replace("WRITTEN", written)
    said = rendered(model(tmp_path, template), [{"role": "user", "content": "x"}, call(arguments)])
    assert said.startswith('<args>{"a": "é"}')


@pytest.mark.parametrize(
    "arguments", ['{"a": ', "[1]", "3", "nonsense", "NaN", "[" * 100_000, '{"a": "\ud800"}']
)
def test_arguments_that_are_no_object_stay_what_the_model_wrote(arguments: str) -> None:
    chat = ChatFields().make_chat([call(arguments)])
    assert chat.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("message", "want"),
    [
        ({"role": "system", "content": f"{BILLING}\nBe brief.\n"}, "Be brief.\n"),
        ({"role": "developer", "content": f"{BILLING}\n{BILLING}\n\n Be brief."}, "\n Be brief."),
        (
            {"role": "system", "content": [{"type": "text", "text": one} for one in (BILLING, "a", "b")]},
            "a\nb",
        ),
        ({"role": "system", "content": BILLING}, None),
        (
            {"role": "system", "content": f"It begins with {BILLING}\nor not."},
            f"It begins with {BILLING}\nor not.",
        ),
        ({"role": "user", "content": f"{BILLING}\nWhat is this?"}, f"{BILLING}\nWhat is this?"),
    ],
)
def test_instructions_are_without_claude_codes_line(message: dict[str, Any], want: str | None) -> None:
    chat = ChatFields().make_chat([copy.deepcopy(message), USER])
    assert chat.messages == ([USER] if want is None else [{**message, "content": want}, USER])
    other = json.loads(json.dumps(message).replace("36ee5", "0aaa9"))
    if message["role"] != "user" and want != message["content"]:
        assert ChatFields().make_chat([other, USER]).opening == chat.opening, "no worker has it in its cache"


def test_a_chat_of_nothing_else_stays() -> None:
    assert len(ChatFields().make_chat([{"role": "system", "content": BILLING}]).messages) == 1


@pytest.mark.parametrize("arguments", ["", None])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    chat = ChatFields().make_chat([call(arguments)])
    assert chat.messages[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "calls",
    ["x", {"a": 1}, ["x"], [{}], [{"function": {"arguments": "{}"}}], [{"type": "custom", "custom": {}}]],
)
def test_calls_without_a_function_are_refused(calls: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\.0\.tool_calls"):
        ChatFields().make_chat([{"role": "assistant", "content": None, "tool_calls": calls}])


def test_a_content_of_null_is_there_and_other_nulls_are_not(tmp_path: Path) -> None:
    path = model(tmp_path)
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": None, "refusal": None}
    assert rendered(path, [message]) == "<|im_start|>assistant\n<|im_end|>\n"
    assert rendered(path, [{**message, "tool_calls": []}]) == "<|im_start|>assistant\n<|im_end|>\n"
    calls = call("")["tool_calls"]
    assert "(none)" in rendered(path, [{"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize(
    ("asks", "want"),
    [
        ("{{ message.content is none }}", "True"),
        ("{{ message['content'] is not none }}", "False"),
        ("{% set content = message.content %}{{ content == none }}", "True"),
        ("{{ message.content }}{{ tools is none }}", "True"),  # and no "None"
        ("{{ 'x' + message.content }}{{ message.content is defined }}", "xTrue"),
    ],
)
def test_null_is_none_for_templates_that_ask_for_it(tmp_path: Path, asks: str, want: str) -> None:
    path = model(tmp_path, "{% for message in messages %}" + asks + "{% endfor %}")
    assert rendered(path, [call("{}")]) == want


def test_null_without_calls_is_an_empty_text(tmp_path: Path) -> None:
    """DeepSeek V3.1's template looks into it then; of a call it asks whether there is one."""
    each = """{%- for message in messages %}
{%- if message.tool_calls is defined %}{{ message.content is none }}
{%- else %}{{ '</think>' in message.content }}{% endif %}{% endfor %}"""
    said = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert rendered(model(tmp_path, each), [said, call("{}")]) == "FalseTrue"


def test_a_role_is_openais_or_the_templates(tmp_path: Path) -> None:
    path = model(tmp_path / "usual")
    with pytest.raises(InvalidRequest, match=r"messages\.1\.role: 'assistent' is none of system"):
        rendered(path, [{"role": "user", "content": "x"}, {"role": "assistent", "content": "y"}])
    named = model(tmp_path / "named", TEMPLATE + "{% if messages[0].role == 'ipython' %}!{% endif %}")
    assert rendered(named, [{"role": "ipython", "content": "x"}]).endswith("!")


def test_a_developer_is_the_system_for_templates_that_do_not_know_developers(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert "<|im_start|>system\nx" in rendered(model(tmp_path / "usual"), messages)
    knows = model(tmp_path / "knows", TEMPLATE + "{% if messages[0].role == 'developer' %}!{% endif %}")
    assert "<|im_start|>developer\nx" in rendered(knows, messages)


@pytest.mark.parametrize("content", ["It is", "It is ", " a\n", "<|im_end|>"])
@pytest.mark.parametrize("family", ["qwen", "llama2"])
def test_an_answer_may_go_on_with_the_last_message(tmp_path: Path, content: str, family: str) -> None:
    make = byte_level if family == "qwen" else byte_fallback
    path = make(tmp_path)
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    want = AutoTokenizer.from_pretrained(path).apply_chat_template(
        chat, tokenize=False, continue_final_message=True
    )
    tokenization = Tokenization(path)
    ours = ChatFields(continue_final_message=True).make_chat(chat)
    assert tokenization.render_chat(ours) == want
    if family == "qwen":  # the other decoder adds spaces
        assert tokenization.decode(tokenization.encode_chat(ours)) == want


def test_a_template_that_leaves_the_last_message_out_cannot_go_on_with_it(tmp_path: Path) -> None:
    tokenization = Tokenization(model(tmp_path, "{{ messages[0].content }}"))
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(InvalidRequest, match="leaves out"):
        tokenization.render_chat(ChatFields(continue_final_message=True).make_chat(chat))


@pytest.mark.parametrize("given", [{}, {"parameters": {"type": "object"}}, {"description": None}])
def test_a_tool_without_a_description_or_a_schema_is_taken(tmp_path: Path, given: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", **given}}]
    template = Tokenization(model(tmp_path, DEMANDING))
    want = 'f // {"type": "object", "properties": {}};U:Hi;'
    assert template.render_chat(ChatFields().make_chat([USER], tools)) == want


def test_arguments_that_are_no_object_are_none_for_templates_that_take_objects_only(tmp_path: Path) -> None:
    template = """{%- for message in messages %}{% for call in message.tool_calls or [] %}
    {{- call.function.name }}{% for name, value in call.function.arguments | items %}{{ name }}{% endfor %}
    {%- endfor %}{{ message.content }}{% endfor %}"""
    path = model(tmp_path, template)
    assert rendered(path, [call('{"a": 1}'), call('{"a": '), USER]) == "addaaddHi"


def test_each_call_has_a_message_of_its_own_where_a_template_refuses_several(tmp_path: Path) -> None:
    template = """{%- for message in messages %}{{ message.role }}
    {%- if message.tool_calls is defined and message.tool_calls | length != 1 %}{{ raise_exception('one!') }}
    {%- endif %}{% for call in message.tool_calls or [] %}{{ call.id }}{% endfor %}
    {{- message.content }};{% endfor %}"""
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "cab"]
    said = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    want = "userHi;assistantaI look.;toolA;assistantb;toolB;assistantc;toolC;userHi;"
    assert rendered(model(tmp_path, template), [USER, said, *results, USER]) == want


def test_what_was_said_beside_calls_joins_the_thoughts_where_a_template_refuses_both(tmp_path: Path) -> None:
    said = {**call({}), "content": "I look.", "reasoning_content": "Hm."}
    path = model(tmp_path, DEMANDING)
    assert rendered(path, [USER, said]) == "U:Hi;A:Hm.\n\nI look.|;"
    with pytest.raises(InvalidRequest, match="no attribute 'thinking'"):
        rendered(path, [USER, {"role": "assistant", "content": "x"}])  # refused for something else


@pytest.mark.parametrize(("first", "second"), [("system", "developer"), ("developer", "system")])
def test_instructions_that_a_template_would_leave_out_are_part_of_the_first_ones(
    tmp_path: Path, first: str, second: str
) -> None:
    """Agents send two: instructions, and a developer's message. gpt-oss's template has one place, Mistral's
    and Gemma's refuse a second one."""
    system = [{"role": first, "content": "One."}, {"role": second, "content": "Two."}]
    one_place = model(tmp_path, DEMANDING)
    assert rendered(one_place, [*system, system[0], USER]) == "S:One.\n\nTwo.\n\nOne.;U:Hi;"
    strict = """{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}
    {{- raise_exception('System message must be at the beginning.') }}{% endif %}
    {{- message.role + ':' + message.content + ';' }}{% endfor %}"""
    assert rendered(model(tmp_path / "b", strict), [*system, USER]) == "system:One.\n\nTwo.;user:Hi;"
    assert rendered(one_place, [system[0], USER, system[1], USER]) == "S:One.;U:Hi;U:Two.;U:Hi;"


def test_several_instructions_stay_apart_where_the_template_has_them_all(tmp_path: Path) -> None:
    both = [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, USER]
    assert rendered(model(tmp_path), [*both, both[0]]).count("<|im_start|>system\n") == 3
    leading = """{%- set ns = namespace(said=false) %}{%- for message in messages %}
    {%- if message.role == 'system' and ns.said %}{{ raise_exception('too late') }}{% endif %}
    {%- if message.role == 'user' %}{% set ns.said = true %}{% endif %}
    {{- message.role + ':' + message.content + ';' }}{% endfor %}"""
    want = "system:One.;system:Two.;user:Hi;user:One.;"
    assert rendered(model(tmp_path / "b", leading), [*both, both[0]]) == want
