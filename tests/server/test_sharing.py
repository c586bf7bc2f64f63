"""Conversations that move between servers: what the next turn finds, for every way in which a chat goes on."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import be_patient
from tests.support.serving import encode
from tests.support.sharing import sharing_servers

USER = {"role": "user", "content": "Tell me about the sea."}
OFF = {"thinking": {"type": "disabled"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = (
    "I look.\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Zürich</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    be_patient(monkeypatch)


def lost(server):
    """Tokens that had been saved and were computed anew, by reason; the exposition is well formed."""
    families = {family.name: family for family in text_string_to_metric_families(server.metrics())}
    return {sample.labels["reason"]: sample.value for sample in families["dsuf_kv_reuse_lost_tokens"].samples}


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_at_another_server_finds_prompt_and_answer(tmp_path, path, stream):
    with sharing_servers(tmp_path, paths=(path,)) as (a, b):
        first = a.ask([USER], **OFF)
        assert (first.cached, first.source) == (0, "none") and a.log()[-1]["cache_look_up"] == "none"
        messages = [USER, first.message, user("And the sky?")]
        there = b.ask(messages, **OFF)
        assert there.source == "remote" and there.cached >= first.prompt + first.completion - 3
        assert b.log()[-1]["cache_look_up"] == "found"
        here = a.ask(messages, **OFF)  # finds what the other one saved at the end of this very prompt
        assert here.cached >= there.prompt - 2 and here.message == there.message
        back = a.ask([*messages, there.message, user("And the land?")], **OFF)
        assert back.source == "remote" or back.cached >= there.prompt + there.completion - 3
        assert f'dsuf_kv_pulled_bytes_total{{path="{path}"}}' in b.metrics()


def test_a_tool_call_and_its_result_go_on_where_they_were(tmp_path):
    with sharing_servers(tmp_path, answers={"How is Zürich?": CALL}) as (a, b):
        asked = [user("How is Zürich?")]
        for more in (OFF, {}):
            first = a.ask(asked, tools=TOOLS, **more)
            (call,) = first.message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            there = b.ask([*asked, first.message, result], tools=TOOLS, **more)
            assert there.cached >= first.prompt + first.completion - 3, more


def test_thinking_that_is_kept_is_found_and_thinking_that_is_dropped_costs_the_answer_only(tmp_path):
    with sharing_servers(tmp_path) as (a, b):
        kept = a.ask([USER], tools=TOOLS)
        assert kept.message["reasoning_content"] == "hm, hm"
        there = b.ask([USER, kept.message, user("More")], tools=TOOLS)
        assert there.cached >= kept.prompt + kept.completion - 3
        dropped = a.ask([USER])
        assert not any(lost(b).values())
        there = b.ask([USER, dropped.message, user("More")])
        assert there.source == "remote" and dropped.prompt - 2 <= there.cached <= dropped.prompt
        assert lost(b)["rendering"] >= len(encode(dropped.message["content"])) + 1


def test_an_answer_in_other_tokens_than_its_text_would_give_is_found_whole(tmp_path):
    # llama.cpp 26398
    letters = [encode(letter)[0] for letter in "The sea is wide and blue"]
    assert len(letters) > len(encode("The sea is wide and blue"))
    with sharing_servers(tmp_path, answers={USER["content"]: letters}) as (a, b):
        first = a.ask([USER], **OFF)
        assert first.message["content"] == "The sea is wide and blue" and first.completion == len(letters) + 1
        there = b.ask([USER, first.message, user("More")], **OFF)
        assert there.source == "remote" and there.cached >= first.prompt + first.completion - 3


def test_the_same_question_again_and_a_fork_start_at_the_end_of_the_prompt(tmp_path):
    with sharing_servers(tmp_path) as (a, b):
        first = a.ask([USER])
        again = b.ask([USER])
        assert again.source == "remote" and again.cached >= first.prompt - 2 and again.message == first.message
        plain = a.ask([USER], **OFF)
        fork = b.ask([USER, {"role": "assistant", "content": "Something else."}, user("More")], **OFF)
        assert fork.cached >= plain.prompt - 2


def test_an_edited_message_goes_on_from_the_last_point_before_the_edit(tmp_path):
    with sharing_servers(tmp_path) as (a, b):
        first = a.ask([USER], **OFF)
        second = a.ask([USER, first.message, user("And the sky?")], **OFF)
        edited = b.ask([USER, first.message, user("And the moon?")], **OFF)
        assert first.prompt + first.completion - 3 <= edited.cached < second.prompt - 2


def test_a_long_text_that_begins_alike_is_found_inside(tmp_path):
    text = "Once upon a time there was a sea. " * 200
    with sharing_servers(tmp_path) as (a, b):
        first = a.ask([user(text + "What is it about?")], **OFF)
        there = b.ask([user(text + "Who wrote it?")], **OFF)
        assert there.source == "remote" and there.cached == first.prompt // 512 * 512


def test_keys_of_several_tenants_share_nothing(tmp_path):
    with sharing_servers(tmp_path, api_keys=("key-one", "key-two")) as (a, b):
        a.headers = {"authorization": "Bearer key-one"}
        first = a.ask([USER], **OFF)
        b.headers = {"x-api-key": "key-two"}
        assert b.ask([USER], **OFF).cached == 0
        b.headers = {"x-api-key": "key-one"}
        assert b.ask([USER], **OFF).cached >= first.prompt - 2
        b.headers = {"authorization": "Basic key-one", "x-api-key": "key-two"}  # the key that counts is the one checked
        assert b.ask([user("Tell me about the sea again.")], **OFF).cached == 0


def test_keys_of_one_name_share_and_a_single_name_does_not_share_with_nobody(tmp_path):
    keys = ("old", "new", "other")
    names = {"old": "alice", "new": "alice"}
    with sharing_servers(tmp_path, names="a", api_keys=keys, key_names=names) as (a,):
        a.headers = {"x-api-key": "old"}
        first = a.ask([USER], **OFF)
        a.headers = {"x-api-key": "other"}
        assert a.ask([USER], **OFF).cached == 0
        a.headers = {"x-api-key": "new"}
        assert a.ask([USER], **OFF).cached >= first.prompt - 2


def test_a_stop_string_a_limit_and_an_error_leave_nothing_behind(tmp_path):
    with sharing_servers(tmp_path, names="a") as (a,):
        whole = a.ask([USER], **OFF)
        limited = a.ask([USER], **{**OFF, "max_tokens": 3})
        following = a.ask([USER, limited.message, user("More")], **OFF)
        assert following.cached >= limited.prompt + 3 - 3
        a.ask([USER], stop=["sea"], **OFF)
        assert a.ask([USER], **OFF).message == whole.message
        assert re.search(r"dsuf_kv_leases 0\n", a.metrics()) and re.search(r"dsuf_kv_requests 0\n", a.metrics())


LONG = "One two three four five six seven eight nine ten. " * 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (" four", "One two three"),
        ("ree fo", "One two th"),  # within a token
        ("nine ten. One two", "One two three four five six seven eight "),
        ("\n\n", "A crown 👑"),  # a token is the end of the crown and the line breaks
    ],
)
def test_an_answer_that_a_stop_string_ended_is_gone_on_from(tmp_path, stop, text, stream):
    said = "A crown 👑\n\n" + LONG if text.endswith("👑") else LONG
    with sharing_servers(tmp_path, answers={USER["content"]: said}, step_s=0.02) as (a, b):
        heard, prompt = a.told([USER], stream, stop=[stop], **OFF)
        assert heard == text
        there = b.ask([USER, {"role": "assistant", "content": text}, user("More")], **OFF)
        assert there.source == "remote" and there.cached >= prompt + len(encode(text)) - 2


def test_what_was_heard_of_an_answer_that_its_client_left_is_gone_on_from(tmp_path):
    with sharing_servers(tmp_path, answers={USER["content"]: LONG}, step_s=0.2) as (a, b):
        heard, prompt = a.told([USER], True, leave_after=4, **OFF)
        assert 9 <= len(encode(heard)) <= 12 and a.log()[-1]["status"] == "cancelled"
        there = b.ask([USER, {"role": "assistant", "content": heard}, user("More")], max_tokens=3, **OFF)
        assert there.source == "remote" and there.cached >= prompt + len(encode(heard)) - 2


def test_any_server_is_as_good_as_the_one_that_a_conversation_began_at(tmp_path):
    """Round robin over three servers, 10 conversations of 6 turns: the token hit rate of sticky routing, less 2 %."""

    def rate(folder, server_of):
        folder.mkdir()
        cached = prompt = 0
        with sharing_servers(folder, names="abc") as servers:
            talks = [[] for _ in range(10)]
            for turn in range(6):
                for number, messages in enumerate(talks):
                    messages.append(user(f"Question {turn} of conversation {number}, about the sea."))
                    got = servers[server_of(number, turn) % 3].ask(messages, **OFF)
                    messages.append(got.message)
                    cached, prompt = cached + got.cached, prompt + got.prompt
        return cached / prompt

    sticky = rate(tmp_path / "sticky", lambda number, turn: number)
    robin = rate(tmp_path / "robin", lambda number, turn: number + turn)
    assert sticky > 0.6 and robin > sticky - 0.02, (sticky, robin)
