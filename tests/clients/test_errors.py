"""Errors as the official package shows them, and its retries."""

import json
import os
import ssl
import subprocess
import threading
import time

import httpx
import openai
import pytest
import trustme
from conftest import MODEL
from openai import OpenAI

HELLO = [{"role": "user", "content": "Hello!"}]
#: An answer that goes on until it is dropped: none of the tokens that end one may be drawn.
ENDLESS = {"model": MODEL, "messages": HELLO, "stream": True, "logit_bias": {"2017": -100, "2020": -100, "2030": -100}}


def with_key(base_url, key, **options) -> OpenAI:
    return OpenAI(base_url=base_url, api_key=key, **{"max_retries": 0, **options})


@pytest.mark.parametrize(
    ("request_fields", "error", "param", "code"),
    [
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_value"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * (9 << 20)}]}, openai.APIStatusError, None, "request_too_large"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]},
            openai.BadRequestError,
            "messages[0].content[0].type",
            None,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_are_typed(client, request_fields, error, param, code):
    with pytest.raises(error) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **request_fields})
    assert refused.value.param == param
    assert code is None or refused.value.code == code
    assert refused.value.request_id, "every answer has an x-request-id"


def test_keys(base_url):
    with pytest.raises(openai.AuthenticationError):
        with_key(base_url, "sk-wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        with_key(base_url, "sk-suspended").models.list()


def test_a_key_that_has_used_its_tokens_is_told_when_to_come_again(base_url):
    frugal = with_key(base_url, "sk-frugal")
    with pytest.raises(openai.RateLimitError) as refused:
        for _ in range(5):
            frugal.chat.completions.create(model=MODEL, messages=HELLO)
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60


def test_the_sdk_retries_until_there_is_room(base_url):
    """A stream occupies the key's only place; a second request comes again until the stream has ended."""
    patient = with_key(base_url, "sk-single", max_retries=10)
    stream = patient.chat.completions.create(**ENDLESS)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError):
        with_key(base_url, "sk-single").chat.completions.create(model=MODEL, messages=HELLO)
    threading.Timer(0.5, stream.close).start()
    started = time.monotonic()
    completion = patient.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, temperature=0)
    assert completion.retries_taken > 0 and time.monotonic() - started > 0.3
    assert completion.parse().choices[0].message.content == "Hello! How can I help you?"


def test_a_client_timeout_is_its_own_and_costs_no_other(client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).chat.completions.create(model=MODEL, messages=HELLO)
    assert client.models.list().data


def test_a_dropped_stream_frees_its_place(base_url):
    single = with_key(base_url, "sk-single", max_retries=3)
    for _ in range(3):
        with single.chat.completions.create(**ENDLESS) as stream:
            next(iter(stream))


def test_tls(tmp_path):
    """A stack of its own behind a certificate of its own."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    (tmp_path / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    (tmp_path / "tls.key").write_bytes(certificate.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    ready = tmp_path / "ready.json"
    environment = os.environ | {
        "DAMASK_GATEWAY__TLS": f"{{certificate: {tmp_path}/tls.crt, key: {tmp_path}/tls.key}}",
        "DAMASK_SUPERVISED": "1",
    }
    command = [os.environ["DAMASK"], "--log-level", "warn", "up", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    stack = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert stack.poll() is None and time.monotonic() < deadline, "the stack did not start"
            time.sleep(0.05)
        url = f"https://{json.loads(ready.read_text())['http']}/v1"
        trusting = httpx.Client(verify=ssl.create_default_context(cafile=str(tmp_path / "ca.crt")))
        secure = OpenAI(base_url=url, api_key="none", http_client=trusting, max_retries=0)
        completion = secure.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
        assert completion.choices[0].message.content == "Hello! How can I help you?"
        with pytest.raises(openai.APIConnectionError):
            OpenAI(base_url=url, api_key="none", max_retries=0).models.list()
    finally:
        stack.stdin.close()
        assert stack.wait(30) == 0
