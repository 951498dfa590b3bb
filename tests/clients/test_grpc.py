"""A client generated from proto/ by grpcio-tools: tokens with `Inference.Generate`, messages with `Gateway.Chat`."""

import time

import grpc
import httpx
import pytest
from conftest import MODEL, chat_cases
from damask.v1 import gateway_pb2, gateway_pb2_grpc, inference_pb2, inference_pb2_grpc
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

CASE = next(case for case in chat_cases() if case["skill"] == "arith")
LONG_RUN = inference_pb2.GenerateRequest(prompt_tokens=range(1, 40), max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def router(addresses):
    with grpc.insecure_channel(addresses["router"]) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def gateway(addresses):
    with grpc.insecure_channel(addresses["gateway"]) as channel:
        yield gateway_pb2_grpc.GatewayStub(channel)


def key(name: str) -> tuple:
    return (("authorization", f"Bearer {name}"),)


def question(text: str, **fields) -> gateway_pb2.ChatRequest:
    user = gateway_pb2.ChatMessage(user=gateway_pb2.UserMessage(text=text))
    sampling = inference_pb2.Sampling(temperature=0)
    return gateway_pb2.ChatRequest(messages=[user], sampling=sampling, **fields)


def details(error: grpc.RpcError) -> dict:
    """The typed details of a refusal, by name."""
    found = {}
    for detail in rpc_status.from_call(error).details:
        message = getattr(error_details_pb2, detail.TypeName().rsplit(".", 1)[1])()
        detail.Unpack(message)
        found[detail.TypeName()] = message
    return found


def test_generate_streams_numbered_tokens(router, base_url):
    chat = {**CASE["request"], "chat_template_kwargs": {k: v for k, v in CASE["render"].items() if k != "reasoning_effort"}}
    url = base_url.removesuffix("/v1") + "/tokenize"
    prompt = httpx.post(url, json=chat, headers={"authorization": "Bearer sk-tests"}).json()["tokens"]
    request = inference_pb2.GenerateRequest(prompt_tokens=prompt, sampling=inference_pb2.Sampling(temperature=0))
    events = list(router.Generate(request))
    assert events[0].WhichOneof("event") == "started" and events[-1].WhichOneof("event") == "finished"
    tokens = []
    for event in events[1:-1]:
        assert event.tokens.first_index == len(tokens)
        tokens += [token.id for token in event.tokens.tokens]
    assert tokens == CASE["completion_token_ids"]
    usage = events[-1].finished.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (len(prompt), len(tokens))
    info = router.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert info.fingerprint.model == MODEL and info.ready_pairs == 1


def test_chat_streams_messages(gateway):
    events = list(gateway.Chat(question("What is the capital of Senegal?"), metadata=key("sk-tests")))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started" and kinds[-1] == "finished" and set(kinds[1:-1]) == {"reasoning", "content"}
    assert "".join(event.content.text for event in events) == "The capital of Senegal is Dakar."
    assert events[-1].finished.reason == gateway_pb2.CHAT_FINISH_REASON_STOP
    assert events[-1].finished.usage.reasoning_tokens > 0


def test_a_deadline_ends_the_stream_and_its_work(router):
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as ended:
        list(router.Generate(LONG_RUN, timeout=0.5))
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 2


def test_a_timeout_in_the_request_is_kept_by_the_server(gateway):
    request = question("List the numbers from 18 to 48.")
    request.timeout.FromMilliseconds(20)
    with pytest.raises(grpc.RpcError) as ended:
        list(gateway.Chat(request, metadata=key("sk-tests")))
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_cancellation(router):
    stream = router.Generate(LONG_RUN)
    for event in stream:
        if event.WhichOneof("event") == "tokens":
            stream.cancel()
            break
    with pytest.raises(grpc.RpcError) as ended:
        list(stream)
    assert ended.value.code() == grpc.StatusCode.CANCELLED


def test_refusals_carry_their_reason_and_when_to_come_again(gateway, router):
    with pytest.raises(grpc.RpcError) as refused:
        list(router.Generate(inference_pb2.GenerateRequest()))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "prompt_tokens" in refused.value.details()
    assert details(refused.value)["google.rpc.ErrorInfo"].domain == "damask"

    first = gateway.Chat(question("List the numbers from 18 to 48."), metadata=key("sk-single"))
    next(iter(first))
    with pytest.raises(grpc.RpcError) as refused:
        list(gateway.Chat(question("hi"), metadata=key("sk-single")))
    first.cancel()
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    found = details(refused.value)
    assert found["google.rpc.ErrorInfo"].reason == "OVERLOADED"
    assert found["google.rpc.RetryInfo"].retry_delay.ToMilliseconds() > 0

    for name, code in [("sk-wrong", grpc.StatusCode.UNAUTHENTICATED), ("sk-suspended", grpc.StatusCode.PERMISSION_DENIED)]:
        with pytest.raises(grpc.RpcError) as refused:
            list(gateway.Chat(question("hi"), metadata=key(name)))
        assert refused.value.code() == code


@pytest.mark.parametrize("port", ["router", "gateway"])
def test_reflection_lists_the_services(addresses, port):
    with grpc.insecure_channel(addresses[port]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = {"router": "damask.v1.Inference", "gateway": "damask.v1.Gateway"}[port]
        assert service in database.get_services() and "grpc.health.v1.Health" in database.get_services()
        method = database.FindFileContainingSymbol(service).service[0].method[0].name
        assert method == {"router": "Generate", "gateway": "Chat"}[port]
