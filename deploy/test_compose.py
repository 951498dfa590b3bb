"""What compose.yaml promises, on a running engine; run by test-compose.sh. Python's standard library and the docker commands only.

A *long answer* is a greedy completion whose end tokens are forbidden, so its length is known and its text is the same each time: whatever
happens to the containers meanwhile, a client must get that very text, or an error that it can see.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).parent
SERVICES = ["gateway", "router", "prefill-cpu", "decode-cpu"]
ADMIN_PORTS = {"gateway": 8002, "router": 9001, "prefill-cpu": 9101, "decode-cpu": 9201}
HTTP_PORT = int(os.environ.setdefault("HTTP_PORT", "18000"))
os.environ.setdefault("GRPC_PORT", "18001")
LONG_TOKENS = 1500
IMAGE_BYTES_MAX = 60e6
RECOVERY_S = 30
# gpt-oss-nano's end tokens: <|return|>, <|call|>, padding.
END_TOKENS = ("2020", "2017", "2030")


def run(*command, check=True, timeout=120):
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=timeout)
    if check and result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {result.stdout}{result.stderr}")
    return result


def compose(*arguments, **options):
    has_plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    command = ["docker", "compose"] if has_plugin else ["docker-compose"]
    return run(*command, "--profile", "cpu", *arguments, **options)


def up(*arguments):
    compose("--profile", "spare", "up", "-d", *arguments, timeout=180)


def container(service):
    return compose("ps", "-q", service).stdout.split()[0]


def inspect(service):
    return json.loads(run("docker", "inspect", container(service)).stdout)[0]


def require(condition, message):
    if not condition:
        raise AssertionError(message)


def eventually(what, function, within_s=RECOVERY_S):
    """Waits until `function` raises nothing and gives something; tells how long that took."""
    start, last = time.monotonic(), None
    while time.monotonic() - start < within_s:
        try:
            value = function()
            if value:
                return time.monotonic() - start
            last = value
        except (AssertionError, OSError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"not within {within_s} s: {what}: {last}")


def post(path, body, timeout=60):
    connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=timeout)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection.getresponse()


def ask(question="What is the capital of France?", timeout=60):
    response = post("/v1/chat/completions", {"messages": [{"role": "user", "content": question}], "temperature": 0}, timeout)
    text = response.read().decode()
    require(response.status == 200, f"{response.status} {text}")
    return json.loads(text)["choices"][0]["message"]["content"]


class Broken(Exception):
    """The answer ended with an error that the client can see."""


def long_answer(on_token=lambda n: None, tokens=LONG_TOKENS):
    """Streams a long answer and returns its text. `Broken` if it says that it failed; an assertion if it ends as if it were whole."""
    body = {"prompt": "What is the capital of France?", "max_tokens": tokens, "temperature": 0, "stream": True}
    body["logit_bias"] = dict.fromkeys(END_TOKENS, -100)
    try:
        response = post("/v1/completions", body)
        if response.status != 200:
            raise Broken(f"{response.status} {response.read().decode()}")
        text, finish, done, count = "", None, False, 0
        for line in response:
            line = line.decode().strip()
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise Broken(event["error"])
                for choice in event["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                count += 1
                on_token(count)
    except (OSError, http.client.HTTPException) as error:
        raise Broken(error) from error
    if not done:
        raise Broken("the stream ended without [DONE]")
    require(finish == "length", f"ended as {finish} without an error")
    return text


def metrics(service):
    networks = inspect(service)["NetworkSettings"]["Networks"].values()
    address = next(network["IPAddress"] for network in networks)
    connection = http.client.HTTPConnection(address, ADMIN_PORTS[service], timeout=5)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def metric(service, name):
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics(service).splitlines() if line.startswith((f"{name} ", f"{name}{{")))


def num_ready(role):
    """Ready workers that the router knows."""
    return metric("router", f'damask_router_workers{{role="{role}",state="ready"}}')


def during_long_answer(action):
    """Runs `action` while a long answer is under way. Returns the answer, or `Broken`, and what the action returned."""
    under_way = threading.Event()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(long_answer, lambda count: under_way.set() if count > 20 else None)
        require(under_way.wait(30), "the long answer did not start")
        require(not answer.done(), "the long answer is too short for this test")
        outcome = action()
        try:
            return answer.result(120), outcome
        except Broken as broken:
            return broken, outcome


def crasher(service):
    """Kills as the kernel's out-of-memory killer would; `docker kill` would count as an operator's wish, and nothing would restart it."""
    pid = inspect(service)["State"]["Pid"]
    return lambda: os.kill(pid, signal.SIGKILL)


class Suite:
    def __init__(self):
        self.passed, self.failed = 0, 0
        self.reference = None

    def check(self, name, function, *arguments):
        start = time.monotonic()
        try:
            note = function(*arguments)
            self.passed += 1
            print(f"ok      {name} ({time.monotonic() - start:.1f} s){f': {note}' if note else ''}", flush=True)
        except Exception as error:  # each failure is told, none ends the run
            self.failed += 1
            print(f"FAILED  {name} ({time.monotonic() - start:.1f} s): {error}", flush=True)

    def starts(self):
        compose("up", "-d", timeout=180)
        # The gateway is started once the router is healthy, and that once there is a pair of workers.
        took = eventually("all healthy", lambda: all(inspect(s)["State"]["Health"]["Status"] == "healthy" for s in SERVICES))
        return f"all healthy {took:.1f} s after `up -d` returned"

    def image_is_small(self):
        image = run("docker", "image", "inspect", "--format", "{{.Size}}", inspect("gateway")["Image"]).stdout
        require(int(image) < IMAGE_BYTES_MAX, f"{int(image) / 1e6:.0f} MB")
        return f"{int(image) / 1e6:.0f} MB"

    def is_confined(self, service):
        pid = inspect(service)["State"]["Pid"]
        status = dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
        require(status["Uid"].split() == ["10001"] * 4, f"user {status['Uid']}")
        require(int(status["CapBnd"], 16) == 0 and int(status["CapEff"], 16) == 0, f"capabilities {status['CapBnd']}")
        require(status["NoNewPrivs"] == "1", "may gain privileges")
        require(status["Seccomp"] == "2", "no seccomp filter")
        mounts = [line.split() for line in pathlib.Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
        root = next(fields for fields in mounts if fields[4] == "/")
        require("ro" in root[5].split(","), f"root is mounted {root[5]}")

    def chats_from_inside(self):
        answer = compose("exec", "-T", "gateway", "damask", "chat", "--url", "http://127.0.0.1:8000", "What is the capital of France?")
        require("Paris" in answer.stdout, answer.stdout)

    def chats_from_outside(self):
        require("Paris" in ask(), ask())
        self.reference = long_answer()
        require(long_answer() == self.reference, "a greedy answer differs from its repetition")

    def passes_through_all(self):
        before = metric("router", "damask_router_kv_transfer_bytes_total")
        steps = {service: metric(service, "damask_steps_total") for service in ("prefill-cpu", "decode-cpu")}
        ask()
        require(metric("router", "damask_router_kv_transfer_bytes_total") > before, "no KV was transferred")
        for service, count in steps.items():
            require(metric(service, "damask_steps_total") > count, f"{service} computed nothing")

    def dashboard_has_data(self):
        """Each metric that the dashboard draws is there after some traffic, but for those that count failures."""
        exposed = "\n".join(map(metrics, SERVICES))
        wanted = set(re.findall(r"damask_[a-z_]+", (HERE / "../helm/damask/files/dashboard.json").read_text()))
        missing = {name for name in wanted if f"\n{name}" not in exposed and not re.search("failures|resumptions", name)}
        require(not missing, sorted(missing))
        return f"{len(wanted)} metrics"

    def survives_crash_of_worker(self, service):
        restarts, resumed = inspect(service)["RestartCount"], metric("router", "damask_router_resumptions_total")
        answer, _ = during_long_answer(crasher(service))
        require(not isinstance(answer, Broken), f"the client saw an error: {answer}")
        require(answer == self.reference, "the client got another text")
        took = eventually("ready again", lambda: "Paris" in ask(timeout=10))
        eventually("restarted", lambda: inspect(service)["RestartCount"] == restarts + 1)
        if service == "decode-cpu":
            require(metric("router", "damask_router_resumptions_total") > resumed, "it was not needed for the running answer")
        return f"the running answer went on unbroken; next chat {took:.1f} s after its end"

    def survives_crash_of_front(self, service):
        """There is one of each in front, so that running answers may break; but visibly, and the next one must work."""
        restarts = inspect(service)["RestartCount"]
        answer, _ = during_long_answer(crasher(service))
        require(isinstance(answer, Broken) or answer == self.reference, "the client got another text, and no error")
        took = eventually("ready again", lambda: "Paris" in ask(timeout=10))
        eventually("restarted", lambda: inspect(service)["RestartCount"] == restarts + 1)
        kind = "broke off, visibly" if isinstance(answer, Broken) else "went on unbroken"
        return f"the running answer {kind}; next chat {took:.1f} s after its end"

    def survives_network_cut(self, service, alias):
        network = next(iter(inspect(service)["NetworkSettings"]["Networks"]))
        name = container(service)

        def cut():
            run("docker", "network", "disconnect", network, name)
            noticed = eventually("noticed", lambda: not is_ready(), within_s=10)
            run("docker", "network", "connect", "--alias", alias, "--alias", service, network, name)
            return noticed

        answer, noticed = during_long_answer(cut)
        require(not isinstance(answer, Broken), f"the client saw an error: {answer}")
        require(answer == self.reference, "the client got another text")
        eventually("ready again", lambda: "Paris" in ask(timeout=10))
        return f"noticed after {noticed:.1f} s; the running answer went on unbroken"

    def frees_everything(self):
        def idle():
            busy = {}
            for service in ("prefill-cpu", "decode-cpu"):
                for line in metrics(service).splitlines():
                    is_idle = any(f'state="{state}"' in line for state in ("free", "cached"))
                    if line.startswith("damask_kv_pages{") and not is_idle and not line.endswith(" 0"):
                        busy[service] = line
            require(not busy, busy)
            return True

        eventually("no page is held", idle, within_s=15)

    def replaces_worker(self, service, role):
        """A spare stands in while the worker is replaced, and new requests keep coming: none may fail."""
        stop, outcomes = threading.Event(), []

        def keep_asking():
            while not stop.is_set():
                try:
                    outcomes.append("Paris" in ask())
                except Exception as error:  # counted below
                    outcomes.append(error)
                time.sleep(0.05)

        def replace():
            up("--no-deps", "--force-recreate", service)
            eventually("the new one is found", lambda: num_ready(role) == 2)
            compose("--profile", "spare", "stop", f"{service}-spare")

        before = container(service)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            up("--no-deps", f"{service}-spare")
            eventually("the spare is found", lambda: num_ready(role) == 2)
            clients = [pool.submit(keep_asking) for _ in range(2)]
            try:
                answer, _ = during_long_answer(replace)
                eventually("the spare is gone", lambda: num_ready(role) == 1)
            finally:
                stop.set()
            concurrent.futures.wait(clients)
        require(container(service) != before, "it was not replaced")
        failures = [outcome for outcome in outcomes if outcome is not True]
        require(not failures, f"{len(failures)} of {len(outcomes)} requests failed: {failures[:1]}")
        require(answer == self.reference, f"the running answer: {answer}")
        return f"{len(outcomes)} requests meanwhile, none failed"

    def replaces_front(self, service):
        """Running answers are finished before the old one ends; then the new one serves."""
        answer, _ = during_long_answer(lambda: up("--no-deps", "--force-recreate", service))
        require(answer == self.reference, f"the running answer: {answer}")
        took = eventually("ready again", lambda: "Paris" in ask(timeout=10))
        return f"the running answer was finished; next chat {took:.1f} s after its end"

    def stops(self):
        compose("stop", timeout=120)
        for service in SERVICES:
            compose_id = compose("ps", "-a", "-q", service, check=False).stdout.split() or compose("ps", "-q", service).stdout.split()
            state = json.loads(run("docker", "inspect", compose_id[0]).stdout)[0]["State"]
            require(state["ExitCode"] == 0, f"{service} ended with {state['ExitCode']}")


def down():
    compose("--profile", "spare", "down", "--volumes", "--timeout", "5", check=False)


def is_ready():
    connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=2)
    connection.request("GET", "/health/ready")
    return connection.getresponse().status == 200


def scenarios(suite):
    suite.check("starts", suite.starts)
    if suite.failed:
        return
    suite.check("the image is below 60 MB", suite.image_is_small)
    for service in SERVICES:
        suite.check(f"{service} is not root, has no capabilities, cannot write its root", suite.is_confined, service)
    suite.check("chat from inside a container", suite.chats_from_inside)
    suite.check("chat through the published port", suite.chats_from_outside)
    if suite.reference is None:
        return
    suite.check("a chat passes through all four", suite.passes_through_all)
    suite.check("the dashboard's metrics are there", suite.dashboard_has_data)
    for service in ("decode-cpu", "prefill-cpu"):
        suite.check(f"crash of {service}", suite.survives_crash_of_worker, service)
    for service in ("router", "gateway"):
        suite.check(f"crash of {service}", suite.survives_crash_of_front, service)
    for service, alias in (("decode-cpu", "decode"), ("prefill-cpu", "prefill")):
        suite.check(f"network cut at {service}", suite.survives_network_cut, service, alias)
    suite.check("no KV page is left behind", suite.frees_everything)
    for service, role in (("decode-cpu", "decode"), ("prefill-cpu", "prefill")):
        suite.check(f"replacement of {service} under load", suite.replaces_worker, service, role)
    for service in ("router", "gateway"):
        suite.check(f"replacement of {service}", suite.replaces_front, service)
    suite.check("stops by draining", suite.stops)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--keep", action="store_true", help="leave the containers running")
    keep = arguments.parse_args().keep
    suite, start = Suite(), time.monotonic()
    down()
    try:
        scenarios(suite)
    finally:
        if suite.failed:
            print(compose("logs", "--no-color", "--tail", "15", check=False).stdout)
        if not keep:
            down()
    print(f"{time.monotonic() - start:.0f} s")
    print(f"{suite.passed} passed, {suite.failed} failed")
    sys.exit(suite.failed > 0)


main()
