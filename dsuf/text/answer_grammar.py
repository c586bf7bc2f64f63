"""What an answer must fit, from what a request asks: a schema, a regular expression, or a call that must be made."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as dr

from dsuf.errors import NotSupported
from dsuf.text.fields import Extensions, output_schema, several_calls
from dsuf.text.grammar import Grammar
from dsuf.text.protocols import MESSAGES, Protocol
from dsuf.text.tool_grammar import tool_call_grammar
from dsuf.text.vocabulary import Vocabulary


def answer_grammar(
    protocol: Protocol,
    document: dict[str, Any],
    converted: dr.ConversationRequest,
    extensions: Extensions,
    known: Vocabulary,
) -> Grammar | None:
    """The grammar of the answer, checked, or None when it is free.

    Raises PromptError for a grammar that cannot be kept, NotSupported for what does not go together with one.
    """
    made = _chosen(protocol, document, converted, known)
    if made is None:
        return None
    if converted.conversation.messages[-1].prefix:
        raise NotSupported("a constrained answer that continues a prefix is not supported by this build.")
    if extensions.ignore_eos or (extensions.min_tokens or 0) > 1:
        raise NotSupported("ignore_eos and min_tokens are not supported with a constrained answer. Leave them out.")
    made.check()
    return made


def _chosen(
    protocol: Protocol, document: dict[str, Any], converted: dr.ConversationRequest, known: Vocabulary
) -> Grammar | None:
    conversation, given = converted.conversation, converted.inference_options.output_constraint
    kind, wanted = given.kind if given is not None else None, conversation.response_format
    if kind == "tool_call_required":
        return tool_call_grammar(given.schema, known.dsml_id, several_calls(document))
    stage = converted.parsing_options.thinking_initial_stage
    think_end = known.think_end_id if stage is not None and stage.starts_in_reasoning() else None
    if wanted == "regex":
        if kind == "tool_call":
            raise NotSupported("response_format regex beside tools is not supported by this build. Use either.")
        return Grammar("regex", conversation.response_regex, think_end)
    schema = output_schema(document) if protocol is MESSAGES else None
    if wanted == "json_object":
        schema = ""
    elif wanted == "json_schema":  # the recipe's constraint has a strict schema completed, but gives way to tools
        schema = given.schema if kind == "json" else json.dumps(conversation.response_schema)
    return (
        None if schema is None else Grammar("json", schema, think_end, known.call_start if kind == "tool_call" else ())
    )
