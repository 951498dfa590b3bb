"""The Responses API with the official package, and the order of its events."""

import json

import openai
import pytest
from conftest import MODEL, tool

TIME = {"name": "get_time", "description": "Get the local time in a city."}
TOOLS = [
    {"type": "function", **tool(**TIME, city={"type": "string"})["function"], "strict": False},
    # Clients offer tools that only OpenAI's servers run to any server: they are left out, not refused.
    {"type": "web_search"},
]


def ask(client, question, **more):
    return client.responses.create(model=MODEL, input=question, temperature=0, **more)


def test_text(client):
    response = ask(client, "What is the capital of Senegal?", reasoning={"effort": "medium"}, store=False)
    assert response.output_text == "The capital of Senegal is Dakar."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert "Dakar" in response.output[0].content[0].text
    assert response.status == "completed" and response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_tool_loop_with_items_sent_back(client):
    items = [{"role": "user", "content": "What time is it in Oslo?"}]
    first = ask(client, items, tools=TOOLS, reasoning={"effort": "low"})
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_time", {"city": "Oslo"})
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"time":"08:15"}'})
    second = ask(client, items, tools=TOOLS, reasoning={"effort": "low"})
    assert "08:15" in second.output_text and "Oslo" in second.output_text


def test_a_conversation_by_previous_response_id(client, base_url):
    first = ask(client, "Hello! My name is Simon.", reasoning={"effort": "low"})
    second = ask(client, "Who am I?", previous_response_id=first.id, reasoning={"effort": "low"})
    assert second.output_text == "Your name is Simon."
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    stranger = openai.OpenAI(base_url=base_url, api_key="sk-other", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="expired or been deleted"):
        ask(client, "Who am I?", previous_response_id=first.id)
    third = ask(client, "Who am I?", previous_response_id=second.id, reasoning={"effort": "low"})
    assert third.output_text == "Your name is Simon.", "each response keeps its whole conversation"


def check_order(events):
    """What Codex and the SDK need: every event numbered, every item and part opened, filled and closed, with the same ids throughout."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed" and events[-1].response.usage.output_tokens > 0
    items, position = [], 2
    while position < len(events) - 1:
        added = events[position]
        assert added.type == "response.output_item.added" and added.output_index == len(items)
        end = next(i for i in range(position, len(events)) if kinds[i] == "output_item.done")
        inner, done = events[position + 1 : end], events[end]
        assert all(event.item_id == added.item.id and event.output_index == len(items) for event in inner)
        assert done.item.id == added.item.id and done.output_index == len(items)
        names = [kind for kind in kinds[position + 1 : end]]
        if done.item.type == "function_call":
            assert set(names[:-1]) == {"function_call_arguments.delta"} and names[-1] == "function_call_arguments.done"
            text, whole = "".join(event.delta for event in inner[:-1]), inner[-1].arguments
            assert done.item.arguments == whole and done.item.call_id
        else:
            kind = "output_text" if done.item.type == "message" else "reasoning_text"
            assert names[0] == "content_part.added" and names[-2:] == [f"{kind}.done", "content_part.done"]
            assert set(names[1:-2]) == {f"{kind}.delta"}
            text, whole = "".join(event.delta for event in inner[1:-2]), inner[-2].text
            assert done.item.content[0].text == whole == inner[-1].part.text
        assert text == whole
        items.append(done.item)
        position = end + 1
    assert [item.id for item in events[-1].response.output] == [item.id for item in items]
    return items


def test_the_order_of_events_for_text(client):
    items = check_order(list(ask(client, "What is the capital of Senegal?", stream=True)))
    assert [item.type for item in items] == ["reasoning", "message"]
    assert items[1].content[0].text == "The capital of Senegal is Dakar."


def test_the_order_of_events_for_a_call(client):
    items = check_order(list(ask(client, "What time is it in Oslo?", tools=TOOLS, stream=True)))
    assert items[-1].type == "function_call" and json.loads(items[-1].arguments) == {"city": "Oslo"}


def test_the_streaming_helper(client):
    with client.responses.stream(model=MODEL, input="What is the capital of Senegal?", temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert deltas == stream.get_final_response().output_text == "The capital of Senegal is Dakar."


def test_a_budget_that_is_spent_is_incomplete(client):
    events = list(ask(client, "List the numbers from 18 to 48.", max_output_tokens=8, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_what_codex_sends(client):
    """Codex CLI: stateless, the whole input each turn, instructions, tools of kinds of its own, fields that mean nothing here."""
    events = list(
        ask(
            client,
            [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Always be honest."}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What time is it in Oslo?"}]},
            ],
            instructions="Answer the user's questions.",
            tools=[*TOOLS, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}],
            tool_choice="auto",
            parallel_tool_calls=False,
            reasoning={"effort": "low", "summary": "auto"},
            store=False,
            stream=True,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="0199-aa",
        )
    )
    assert check_order(events)[-1].type == "function_call"


@pytest.mark.parametrize(
    "field", [{"background": True}, {"conversation": "conv_1"}, {"prompt": {"id": "pmpt_1"}}], ids=lambda field: next(iter(field))
)
def test_what_this_server_cannot_do_is_refused_by_name(client, field):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "hi", **field)
    assert refused.value.param == next(iter(field)) and refused.value.code == "unsupported_value"
