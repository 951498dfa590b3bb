"""Chat Completions with the official package."""

import json

import pytest
from conftest import MODEL, chat_cases

CASES = chat_cases()
#: One case of every skill; the Rust runner `tests/tests/chat.rs` does them all in all layouts.
ONE_OF_EACH = list({case["skill"]: case for case in reversed(CASES)}.values())


def ask(client, case, **more):
    """Asks a case as it was recorded, its date and identity included."""
    kwargs = {key: value for key, value in case["render"].items() if key != "reasoning_effort"}
    return client.chat.completions.create(**case["request"], extra_body={"chat_template_kwargs": kwargs}, **more)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case["id"])
def test_answers_are_the_recorded_ones(client, case):
    completion = ask(client, case)
    expect, choice = case["expect"], completion.choices[0]
    assert (choice.message.content or "") == (expect["message"]["content"] or "")
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    expected_calls = expect["message"].get("tool_calls") or []
    assert calls == [(call["name"], json.loads(call["arguments"])) for call in expected_calls]
    assert (choice.message.model_extra.get("reasoning_content") or None) == expect["message"]["reasoning_text"]
    assert choice.finish_reason == expect["finish_reason"]
    assert completion.usage.prompt_tokens == expect["prompt_tokens"]
    assert completion.usage.completion_tokens == expect["completion_tokens"]
    assert completion.usage.completion_tokens_details.reasoning_tokens >= 0


@pytest.mark.parametrize("case", ONE_OF_EACH[::4], ids=lambda case: case["id"])
def test_a_stream_folds_into_the_same_answer(client, case):
    content, usage, finish = "", None, None
    for chunk in ask(client, case, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            usage = chunk.usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert content == (case["expect"]["message"]["content"] or "")
    assert finish == case["expect"]["finish_reason"]
    assert usage.completion_tokens == case["expect"]["completion_tokens"]


def test_the_streaming_helper_accumulates_tool_calls(client):
    """`client.chat.completions.stream` is stricter about deltas than a plain loop."""
    case = next(case for case in CASES if case["skill"] == "tool_call")
    kwargs = {key: value for key, value in case["render"].items() if key != "reasoning_effort"}
    request = {key: value for key, value in case["request"].items() if key != "stream"}
    with client.chat.completions.stream(**request, extra_body={"chat_template_kwargs": kwargs}) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    expected = case["expect"]["message"]["tool_calls"][0]
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == (expected["name"], json.loads(expected["arguments"]))
    assert call.id.startswith("call_")


def test_a_tool_loop_of_two_rounds(client):
    """One question that needs two functions, one after the other: the model makes one call a turn."""
    case = next(case for case in CASES if case["skill"] == "two_tools")
    results = {"find_doctor": {"value": 2793, "message": "ready"}, "translate": {"translation": "heaklou"}}
    messages, called = [case["request"]["messages"][0]], []
    for _ in range(4):
        completion = client.chat.completions.create(
            model=MODEL, messages=messages, tools=case["request"]["tools"], temperature=0, reasoning_effort="low"
        )
        message = completion.choices[0].message
        # The SDK's own message goes back as it came, reasoning included.
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            called.append((call.function.name, json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(results[call.function.name])})
    assert called == [
        ("find_doctor", {"format": "iomlzx", "style": "daily"}),
        ("translate", {"text": "the game starts soon", "language": "Dutch"}),
    ]
    assert completion.choices[0].finish_reason == "stop" and "heaklou" in message.content


def test_several_answers_with_logprobs_and_stop(client):
    messages = [{"role": "user", "content": "List the numbers from 18 to 48."}]
    completion = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, reasoning_effort="low", n=2, logprobs=True, top_logprobs=2, stop="25"
    )
    assert [choice.message.content for choice in completion.choices] == ["18, 19, 20, 21, 22, 23, 24, "] * 2
    tokens = completion.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "18, 19, 20, 21, 22, 23, 24, "
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


def test_the_same_seed_gives_the_same_answer(client):
    def ask(seed):
        return client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello!"}], temperature=1.5, seed=seed, max_tokens=40
        )

    assert ask(7).choices[0].message == ask(7).choices[0].message


def test_models_and_completions(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    completion = client.completions.create(model=MODEL, prompt="Hello", max_tokens=3, temperature=0)
    assert completion.usage.completion_tokens <= 3 and completion.object == "text_completion"
