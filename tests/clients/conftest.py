"""What all suites share: where the stack listens, and the official client for it."""

import json
import os
import pathlib

import pytest
from openai import OpenAI

MODEL = "gpt-oss-nano"
REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def addresses() -> dict:
    """The ready file of `damask up`."""
    return json.loads(pathlib.Path(os.environ["DAMASK_READY_FILE"]).read_text())


@pytest.fixture(scope="session")
def base_url(addresses) -> str:
    return f"http://{addresses['http']}/v1"


@pytest.fixture(scope="session")
def client(base_url) -> OpenAI:
    """The official client, with a key that has no limits, and without retries: what fails shall be seen."""
    return OpenAI(base_url=base_url, api_key="sk-tests", max_retries=0)


def tool(name: str, description: str, **parameters) -> dict:
    """A function as Chat Completions takes it."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
        },
    }


def chat_cases() -> list[dict]:
    """The chat cases: requests, and the one right answer of gpt-oss-nano to each."""
    lines = (REPOSITORY / "tests/fixtures/nano/chat.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.strip()]
