"""A line of an OpenAI batch file, as for the OpenAI API or `vllm run-batch`, as a request.

{"custom_id", "method", "url", "body"}: body holds what is asked and how it is sampled. A field
that would change the answer and cannot be honoured makes a bad row; one without effect on the
text is passed over.
"""

import difflib
from typing import Any

from engine import RequestError, RequestErrorCode
from flows.row_fields import check_messages, check_row_id, check_token_ids
from flows.rows import json_type, shown, without_surrogates

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

# Names of the body that are names of SamplingParams: OpenAI's, then vLLM's.
_SAMPLING_NAMES = frozenset(
    {
        *("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p"),
        *("min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "prompt_logprobs"),
        *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "stream_options", "parallel_tool_calls"),
    }
)
_READ_HERE = frozenset(
    {"messages", "prompt", "max_completion_tokens", "logprobs", "top_logprobs", "priority"}
)
# What may be said as long as it asks for nothing, and why nothing else is possible.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "answers are written when they are whole"),
    "tools": (([],), "tools belong in engine.chat.tools, for all rows"),
    "tool_choice": (("none", "auto"), "no tool is called"),
    "functions": (([],), "tools belong in engine.chat.tools, for all rows"),
    "function_call": (("none", "auto"), "no function is called"),
    "response_format": (({"type": "text"},), "the text is not held to a form"),
    "modalities": ((["text"],), "answers are text"),
    "echo": ((False,), "prompt and answer are not joined"),
    "best_of": ((1,), "every sample is kept; use n"),
    "suffix": (("",), "nothing is inserted"),
    "chat_template_kwargs": (({},), "they belong in engine.chat, for all rows"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "use_beam_search": ((False,), "there is no beam search"),
    "add_generation_prompt": ((True,), "the answer is always the assistant's"),
    "add_special_tokens": ((True, False), "special tokens follow the model's template"),
    "spaces_between_special_tokens": ((True,), "special tokens follow the tokenizer"),
}


def read_custom_id(columns: dict[str, Any]) -> str | None:
    """Return the id of a line, None when it has none.

    Raises:
        RequestError: it cannot be an id.
    """
    value = columns.get("custom_id")
    return None if value is None else check_row_id(value, "custom_id", None)


def read_batch_request(columns: dict[str, Any]) -> dict[str, Any]:
    """Return what the line asks, as the fields of a PromptRecord.

    Raises:
        RequestError: names the field that is missing, wrong, or cannot be honoured.
    """
    if columns.get("custom_id") is None:
        raise _refusal("custom_id is missing; give each line an id of its own")
    if columns.get("method") != "POST":
        raise _refusal(f"method is {shown(columns.get('method'))}, wanted 'POST'")
    url = columns.get("url")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise _refusal(f"url is {shown(url)}; wanted {CHAT_URL} or {COMPLETIONS_URL}")
    body = columns.get("body")
    if not isinstance(body, dict):
        kind = "missing" if body is None else json_type(body)
        raise _refusal(f"body is {kind}, wanted an object")
    # null is what OpenAI's own clients write for a field that is left out.
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_what_cannot_be_honoured(given)
    is_chat = url == CHAT_URL
    sampling = {name: given[name] for name in given if name in _SAMPLING_NAMES}
    return {
        **(_chat(given) if is_chat else _completion(given)),
        "sampling": sampling
        | _max_tokens(given)
        | _top_k(given)
        | _logprobs(given, is_chat=is_chat),
        "priority": _priority(given),
    }


def is_batch_request(columns: dict[str, Any]) -> bool:
    """Tell whether a row of another format looks like a line of a batch file."""
    return "custom_id" in columns and isinstance(columns.get("body"), dict)


def _refuse_what_cannot_be_honoured(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name in _NEUTRAL:
            neutral, reason = _NEUTRAL[name]
            if not any(type(value) is type(each) and value == each for each in neutral):
                raise _refusal(
                    f"body.{name} is {shown(value)}, which is not possible here: {reason}; "
                    "leave it out"
                )
        elif name not in _SAMPLING_NAMES | _WITHOUT_EFFECT | _READ_HERE:
            known = [*_SAMPLING_NAMES, *_READ_HERE]
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            raise _refusal(f"body.{shown(name)[1:-1]} is no field that is known here; {hint}")


def _chat(given: dict[str, Any]) -> dict[str, Any]:
    if "prompt" in given:
        raise _refusal(f"body.prompt does not belong in a request to {CHAT_URL}; use messages")
    if "messages" not in given:
        raise _refusal("body.messages is missing")
    messages = check_messages(given["messages"], "body.messages", None)
    return {
        "messages": without_surrogates(
            [_with_text(f"body.messages[{n}]", message) for n, message in enumerate(messages)]
        )
    }


def _with_text(place: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its parts of text joined; templates rarely read a list of parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            found = shown(part if kind is None else kind)
            raise _refusal(
                f"{place}.content[{index}] is {found}, wanted a part of the type 'text'; the model "
                "reads text alone"
            )
        texts.append(part["text"])
    return message | {"content": "\n".join(texts)}


def _completion(given: dict[str, Any]) -> dict[str, Any]:
    if "messages" in given:
        raise _refusal(f"body.messages does not belong in a request to {COMPLETIONS_URL}")
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": without_surrogates(prompt)}
    if isinstance(prompt, list) and prompt and not any(isinstance(p, str | list) for p in prompt):
        return {"prompt_token_ids": check_token_ids(prompt, "body.prompt", None)}
    raise _refusal(
        f"body.prompt is {'missing' if prompt is None else shown(prompt)}, wanted one string or "
        "one list of token ids; give each prompt a line of its own"
    )


def _max_tokens(given: dict[str, Any]) -> dict[str, Any]:
    newer = given.get("max_completion_tokens")
    if newer is None:
        return {}
    if given.get("max_tokens", newer) != newer:
        raise _refusal("body.max_completion_tokens and body.max_tokens differ; keep one of them")
    return {"max_tokens": newer}


def _top_k(given: dict[str, Any]) -> dict[str, Any]:
    # vLLM writes -1 for all tokens.
    return {"top_k": 0} if given.get("top_k") == -1 else {}


def _logprobs(given: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    asked, number = given.get("logprobs"), given.get("top_logprobs")
    if not is_chat:
        if number is not None:
            raise _refusal("body.top_logprobs does not belong here; write its number as logprobs")
        if isinstance(asked, bool):
            raise _refusal(f"body.logprobs is {shown(asked)}, wanted a number in a completion")
        return {} if asked is None else {"logprobs": asked}
    if not isinstance(asked, bool | None):
        raise _refusal(f"body.logprobs is {shown(asked)}, wanted true or false in a chat")
    if not asked:
        if number:
            raise _refusal(f"body.top_logprobs is {shown(number)} without logprobs: true; add it")
        return {} if asked is None else {"logprobs": None}
    return {"logprobs": 0 if number is None else number}


def _priority(given: dict[str, Any]) -> int:
    value = given.get("priority", 0)
    if type(value) is not int:
        raise _refusal(f"body.priority is {shown(value)}, wanted a whole number")
    return value


def _refusal(message: str) -> RequestError:
    return RequestError(RequestErrorCode.BAD_ROW, message)
