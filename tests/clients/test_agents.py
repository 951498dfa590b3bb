"""openai-agents and LangChain: each drives a loop of tools by itself."""

import json

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from conftest import MODEL
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from openai.types.shared import Reasoning


@pytest.mark.parametrize("model", [OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def test_an_agent_calls_its_tool_and_answers(base_url, model):
    called = []

    @function_tool(strict_mode=False)
    def get_time(city: str) -> str:
        """Get the local time in a city."""
        called.append(city)
        return json.dumps({"time": "08:15"})

    agent = Agent(
        name="clock",
        tools=[get_time],
        model=model(model=MODEL, openai_client=AsyncOpenAI(base_url=base_url, api_key="sk-tests")),
        model_settings=ModelSettings(temperature=0, reasoning=Reasoning(effort="low")),
    )
    result = Runner.run_sync(agent, "What time is it in Oslo?", max_turns=3)
    assert called == ["Oslo"]
    assert "08:15" in result.final_output and "Oslo" in result.final_output


def test_langchain_streams_and_calls_tools(base_url):
    @langchain_tool
    def get_time(city: str) -> str:
        """Get the local time in a city."""
        return json.dumps({"time": "08:15"})

    chat = ChatOpenAI(model=MODEL, base_url=base_url, api_key="sk-tests", temperature=0, reasoning_effort="low", max_retries=0)
    streamed = list(chat.stream("What is the capital of Senegal?"))
    assert "".join(chunk.text for chunk in streamed) == "The capital of Senegal is Dakar."
    messages = [HumanMessage("What time is it in Oslo?")]
    with_tools = chat.bind_tools([get_time])
    for _ in range(3):
        answer = with_tools.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [ToolMessage(get_time.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert [type(message).__name__ for message in messages] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    assert "08:15" in messages[-1].text and messages[-1].usage_metadata["output_tokens"] > 0
