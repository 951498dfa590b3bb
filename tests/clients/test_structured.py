"""Structured output with the official package: `parse()` with bounded schemas, strict tools, required and named calls. nano knows little, so
what is checked is the form: constraints must hold whatever the model would rather say."""

import json

import pytest
from conftest import MODEL, tool
from pydantic import BaseModel, Field


class Capital(BaseModel):
    country: str = Field(max_length=20)
    city: str = Field(max_length=20)
    letters: int = Field(ge=0, le=99)


QUESTION = [{"role": "user", "content": "What is the capital of Senegal?"}]


def test_parse_gives_an_object_of_the_schema(client):
    completion = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Capital, temperature=0)
    message = completion.choices[0].message
    assert isinstance(message.parsed, Capital) and completion.choices[0].finish_reason == "stop"
    assert message.model_extra.get("reasoning_content"), "reasoning stays free"


def test_the_responses_api_parses_too(client):
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=Capital, temperature=0)
    assert isinstance(response.output_parsed, Capital)


def test_json_object(client):
    completion = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format={"type": "json_object"}, temperature=0, max_tokens=400
    )
    if completion.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(completion.choices[0].message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=["required", "named"])
def test_a_call_that_must_come(client, choice):
    tools = [tool("get_time", "Get the local time in a city.", city={"type": "string", "maxLength": 20})]
    tools[0]["function"] |= {"strict": True}
    tools[0]["function"]["parameters"]["additionalProperties"] = False
    completion = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=tools, tool_choice=choice, temperature=0)
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.name == "get_time" and set(json.loads(call.function.arguments)) == {"city"}
    assert completion.choices[0].finish_reason == "tool_calls"
