"""KV between two real processes on one GPU or two: the chat cases of gpt-oss-nano over a transport, and workers killed in every phase.

    python3 tests/gpu/kv_transfer.py target/release/damask --gpus 0,0 --transport ipc chat
    python3 tests/gpu/kv_transfer.py target/release/damask --gpus 0,1 --transport nccl --kills 20 kill
    python3 tests/gpu/kv_transfer.py target/release/damask --gpus 0,1 --transport ipc load

Needs nothing but Python; says that it was skipped where there is no GPU. `chat`: every case must be answered as the case file says.
`kill`: a worker is killed (SIGKILL) before the first batch is announced, between two batches, behind the COMMIT, or while its sequence
generates; the other one must keep its process, answer by a new incarnation within 5 s of that one's readiness, and have all its pages free at the end.
`load`: gpt-oss-20b with random weights; 32 sequences decode while prompts of 8k tokens are prefilled and sent, and beside that nothing, and beside
prompts that are prefilled and not sent (one token is asked for). Times are those of the workers' own metrics.
"""

import argparse, json, os, pathlib, re, shutil, signal, socket, subprocess, sys, tempfile, threading, time, urllib.error, urllib.request

HERE = pathlib.Path(__file__).resolve().parent
CASES = HERE.parent / "fixtures/nano/chat.jsonl"
HOLD_MS = 300
PHASES = {"before_ready": "announce", "mid_transfer": "second", "after_commit": "commit", "generating": "none"}


def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(address, path, timeout=2):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout) as answer:
        return answer.read().decode()


class Service:
    def __init__(self, stack, role, config, gpu=None):
        self.stack, self.role, self.config, self.gpu = stack, role, config, gpu
        self.process, self.lines = None, []

    def start(self):
        path = self.stack.folder / f"{self.role}.yaml"
        path.write_text(json.dumps(self.config))  # JSON is YAML
        env = dict(os.environ)
        if self.gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        command = [self.stack.binary, self.role, "--config", str(path), "--log-level", "info"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        threading.Thread(target=self.read, args=(self.process,), daemon=True).start()

    def read(self, process):
        for line in process.stderr:
            self.lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip()))

    def wait_ready(self, seconds=90):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                sys.exit(f"{self.role} ended with {self.process.returncode}:\n" + "\n".join(self.lines[-20:]))
            try:
                get(self.config["admin_listen"], "/health/ready")
                return
            except OSError:
                time.sleep(0.02)
        sys.exit(f"{self.role} is not ready:\n" + "\n".join(self.lines[-20:]))

    def wait_line(self, text, seen, seconds=20):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if any(text in line for line in self.lines[seen:]):
                return True
            time.sleep(0.0005)
        return False

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def pages(self):
        text = get(self.config["admin_listen"], "/metrics")
        found = re.findall(r'damask_kv_pages\{([^}]*)\} (\d+)', text)
        return {labels: int(count) for labels, count in found}

    def wait_pages_free(self, seconds=10):
        end = time.monotonic() + seconds
        while True:
            busy = {labels: count for labels, count in self.pages().items() if count and 'state="free"' not in labels}
            if not busy or time.monotonic() > end:
                return busy
            time.sleep(0.05)


class Stack:
    def __init__(self, binary, gpus, transport, hold="none", tp=(1, 1), model="embedded-nano"):
        self.binary, self.folder = binary, pathlib.Path(tempfile.mkdtemp(prefix="damask-kv-"))
        ports = {name: f"127.0.0.1:{port()}" for name in ["pg", "pa", "dg", "da", "dk", "rg", "ra", "gg", "ga"]}
        gpus = gpus.split(",") if gpus else [None, None]
        worker = {
            "model": model, "backend": "cuda", "page_tokens": 64, "max_context_tokens": 4096, "full_pages": 512,
            "numerics": {"compute": "bf16", "routing": "bf16", "kv": "bf16"},
            "transfer": {"transport": transport, "checksum_every": 1, "in_flight_bytes_max": 64 << 20, "allow_slow": True},
        }
        if gpus[0] is None:  # a rehearsal on the CPU
            worker |= {"backend": "cpu", "numerics": {}, "page_tokens": 16}
        prefill = json.loads(json.dumps(worker)) | {
            "name": "prefill", "listen": ports["pg"], "admin_listen": ports["pa"], "layout": {"tp": tp[0], "ep": 1}, "chunk_tokens": 256,
        }
        prefill["transfer"] |= {"hold_at": hold, "hold_ms": HOLD_MS if hold != "none" else 0}
        decode = json.loads(json.dumps(worker)) | {
            "name": "decode", "listen": ports["dg"], "admin_listen": ports["da"], "kv_listen": ports["dk"],
            "layout": {"tp": tp[1], "ep": tp[1]}, "max_sequences": 16,
        }
        if model != "embedded-nano":
            for config, pages in ((prefill, 1024), (decode, 6144)):
                config |= {"max_context_tokens": 16384, "full_pages": pages}
                config["transfer"] |= {"checksum_every": 16, "in_flight_bytes_max": 256 << 20}
            prefill["chunk_tokens"], decode["max_sequences"] = 2048, 40
        router = {"listen": ports["rg"], "admin_listen": ports["ra"], "workers": {"prefill": [ports["pg"]], "decode": [ports["dg"]]}}
        gateway = {"listen": ports["gg"], "admin_listen": ports["ga"], "router": ports["rg"], "model": model}
        self.prefill, self.decode = Service(self, "prefill", prefill, gpus[0]), Service(self, "decode", decode, gpus[1])
        self.router, self.gateway = Service(self, "router", router), Service(self, "gateway", gateway)
        self.services = [self.prefill, self.decode, self.router, self.gateway]
        self.url = ports["gg"]

    def __enter__(self):
        for service in self.services:
            service.start()
        for service in self.services:
            service.wait_ready()
        return self

    def __exit__(self, *_):
        for service in reversed(self.services):
            if service.process.poll() is None:
                service.process.terminate()
        for service in self.services:
            try:
                service.process.wait(10)
            except subprocess.TimeoutExpired:
                print(f"{service.role} does not end by SIGTERM")
                service.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def model(self):
        return json.loads(get(self.url, "/v1/models"))["data"][0]["id"]

    def chat(self, case, timeout=30, on_chunk=None):
        """(content, finish_reason, calls) of a streamed answer."""
        kwargs = {key: value for key, value in case["render"].items() if key != "reasoning_effort"}
        body = case["request"] | {"chat_template_kwargs": kwargs, "stream": True}
        request = urllib.request.Request(
            f"http://{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        content, finish, calls, chunks = "", None, {}, 0
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise OSError(str(event["error"]))
                for choice in event.get("choices", []):
                    delta = choice["delta"]
                    content += delta.get("content") or ""
                    for call in delta.get("tool_calls") or []:
                        entry = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                        entry["name"] += call["function"].get("name") or ""
                        entry["arguments"] += call["function"].get("arguments") or ""
                    finish = choice.get("finish_reason") or finish
                    if delta.get("content") or delta.get("reasoning_content"):
                        chunks += 1
                        if on_chunk:
                            on_chunk(chunks)
        return content, finish, [calls[index] for index in sorted(calls)]


def check(case, answer):
    expect, (content, finish, calls) = case["expect"], answer
    loads = lambda arguments: json.loads(arguments) if isinstance(arguments, str) else arguments
    wanted = [(call["name"], loads(call["arguments"])) for call in expect["message"].get("tool_calls") or []]
    found = [(call["name"], loads(call["arguments"] or "null")) for call in calls]
    if (content, finish, found) != (expect["message"].get("content") or "", expect["finish_reason"], wanted):
        return f"{case['id']}: wanted {(expect['message'].get('content'), expect['finish_reason'], wanted)}, got {(content, finish, found)}"
    return None


def metric(service, name):
    values = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", get(service.config["admin_listen"], "/metrics"), re.M)
    return {labels: float(value) for labels, value in values}


def run_chat(args, cases):
    with Stack(args.binary, args.gpus, args.transport, tp=args.tp) as stack:
        wrong = []
        for round_ in range(2):  # one by one, then many at once
            if round_ == 0:
                wrong += [check(case, stack.chat(case)) for case in cases]
            else:
                found = [None] * len(cases)
                def work(k):
                    for i in range(k, len(cases), 8):
                        found[i] = check(cases[i], stack.chat(cases[i]))
                threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
                [thread.start() for thread in threads]
                [thread.join() for thread in threads]
                wrong += found
        wrong = [line for line in wrong if line]
        busy = {service.role: service.wait_pages_free() for service in (stack.prefill, stack.decode)}
        busy = {role: pages for role, pages in busy.items() if pages}
        lanes = [line for line in stack.prefill.lines if "kv data path is open" in line]
        print(f"chat over {args.transport} on gpus {args.gpus}: {2 * len(cases)} answers, {len(wrong)} wrong, pages not free: {busy or 'none'}")
        print("\n".join(line.split("prefill::", 1)[-1] for line in lanes) or "no data path was opened: KV went through host memory")
        print("stage bytes", metric(stack.decode, "damask_transfer_stage_bytes_total"), "checksums", metric(stack.decode, "damask_transfer_checksums_compared_total"))
        print("\n".join(wrong[:5]))
        return not wrong and not busy


def kill_once(stack, role, phase, cases):
    """(milliseconds to the first answer by the new incarnation, complaints)"""
    victim, survivor = (stack.prefill, stack.decode) if role == "prefill" else (stack.decode, stack.prefill)
    pid, seen = survivor.process.pid, len(stack.prefill.lines)
    case, killed = max(cases, key=lambda case: len(case["completion_token_ids"])), threading.Event()

    def at_chunk(count):
        if phase == "generating" and count == 2 and not killed.is_set():
            victim.kill()
            killed.set()

    outcome = []
    def ask():
        try:
            outcome.append(check(case, stack.chat(case, on_chunk=at_chunk)) or "answered")
        except (OSError, urllib.error.URLError) as error:
            outcome.append(f"failed: {error}"[:60])
    asking = threading.Thread(target=ask)
    asking.start()
    if phase != "generating":
        if not stack.prefill.wait_line("held at", seen):
            return 0, "the phase was never reached", outcome
        victim.kill()
        killed.set()
    if not killed.wait(20):
        return 0, "the phase was never reached", outcome
    time.sleep(0.2)
    if survivor.process.poll() is not None:
        return 0, f"{survivor.role} ended with {survivor.process.returncode}: " + "\n".join(survivor.lines[-5:]), outcome
    victim.start()
    victim.wait_ready()
    ready, complaint = time.monotonic(), "no answer"
    while time.monotonic() - ready < 15:
        try:
            wrong = check(cases[0], stack.chat(cases[0], timeout=10))
            complaint = wrong
            break
        except (OSError, urllib.error.URLError) as error:
            complaint = f"no answer: {error}"
            time.sleep(0.02)
    millis = 1e3 * (time.monotonic() - ready)
    asking.join(40)
    busy = survivor.wait_pages_free()
    if busy:
        complaint = f"pages not free: {busy}"
    if survivor.process.poll() is not None or survivor.process.pid != pid:
        complaint = f"{survivor.role} did not survive"
    if not complaint and millis > 5000:
        complaint = "later than 5 s"
    return millis, complaint, outcome


def run_kills(args, cases):
    pairs = [(role, phase) for phase in PHASES for role in ("prefill", "decode")]
    done, failed = 0, 0
    print(f"kills over {args.transport} on gpus {args.gpus}\n| killed | phase | answer of the new incarnation after | the request that was cut | |\n|---|---|---|---|---|")
    for phase, hold in PHASES.items():
        of_phase = [(role, phase) for i in range(args.kills) for role, its in [pairs[i % len(pairs)]] if its == phase]
        if not of_phase:
            continue
        # A sender holds before the first batch of a lane, so each of these kills needs a new one.
        runs = [[kill] for kill in of_phase] if phase == "before_ready" else [of_phase]
        for run in runs:
            with Stack(args.binary, args.gpus, args.transport, hold, args.tp) as stack:
                for role, _ in run:
                    millis, complaint, outcome = kill_once(stack, role, phase, cases)
                    done, failed = done + 1, failed + bool(complaint)
                    print(f"| {role} | {phase} | {millis:.0f} ms | {outcome[0] if outcome else 'open'} | {complaint or 'ok'} |", flush=True)
                    if complaint:
                        break
    print(f"{done} kills, {failed} failed")
    return failed == 0 and done == args.kills


def mean(service, name, before=None):
    """Sum and count of a histogram, or its mean in ms since `before`."""
    text = get(service.config["admin_listen"], "/metrics")
    total, count = (float(re.search(rf"^{name}_{part} (\S+)$", text, re.M)[1]) for part in ("sum", "count"))
    if before is None:
        return total, count
    return 1e3 * (total - before[0]) / max(count - before[1], 1)


def ask(stack, prompt_words, max_tokens, seed, stop=None):
    """Streams an answer and drops it; what came between its lines, in ms."""
    prompt = " ".join(str((seed * 7919 + i * 104729) % 1000) for i in range(prompt_words))
    body = {"model": stack.model(), "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True, "seed": seed,
            "temperature": 1.0, "logit_bias": {"200002": -100, "200007": -100, "200012": -100}}
    request = urllib.request.Request(f"http://{stack.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    gaps, last = [], None
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    now = time.monotonic()
                    gaps += [1e3 * (now - last)] if last else []
                    last = now
                if stop is not None and stop.is_set():
                    break
    except OSError as error:
        print("request failed:", error, getattr(error, "read", lambda: b"")()[:200])
    return gaps


def run_load(args, _):
    with Stack(args.binary, args.gpus, args.transport, model="random:20b:7") as stack:
        print(f"| transport | beside 32 decoding sequences | decode step, mean ms | median of a stream's gaps, ms | prompts | first token, mean ms | tail, mean ms |\n|---|---|---|---|---|---|---|")
        for seed in range(2):  # opens the lane
            ask(stack, 3400, 2, 900 + seed)
        for what, max_tokens in (("nothing", 0), ("8k prompts, not sent", 1), ("8k prompts, sent", 2), ("nothing", 0), ("8k prompts, not sent", 1), ("8k prompts, sent", 2)):
            stop, gaps = threading.Event(), []
            streams = [threading.Thread(target=lambda seed=seed: gaps.append(ask(stack, 40, 4000, seed, stop))) for seed in range(32)]
            [stream.start() for stream in streams]
            time.sleep(2.5)  # all of them decode
            step, first, tail = mean(stack.decode, "damask_step_seconds"), mean(stack.prefill, "damask_first_token_seconds"), mean(stack.prefill, "damask_transfer_tail_seconds")
            end, prompts = time.monotonic() + 5, 0
            while time.monotonic() < end:
                if max_tokens:
                    ask(stack, 3400, max_tokens, 1000 + prompts)
                    prompts += 1
                else:
                    time.sleep(0.1)
            step_ms, first_ms, tail_ms = mean(stack.decode, "damask_step_seconds", step), mean(stack.prefill, "damask_first_token_seconds", first), mean(stack.prefill, "damask_transfer_tail_seconds", tail)
            running = metric(stack.decode, "damask_sequences")
            stop.set()
            [stream.join() for stream in streams]
            every = sorted(gap for stream in gaps for gap in stream[50:])
            median = every[len(every) // 2] if every else float("nan")
            print(f"| {args.transport} | {what} | {step_ms:.3f} | {median:.3f} | {prompts} | {first_ms:.2f} | {tail_ms:.2f} |", flush=True)
            stack.decode.wait_pages_free()
        print("running at the end:", running, "stage bytes", metric(stack.decode, "damask_transfer_stage_bytes_total"), "seconds", metric(stack.decode, "damask_transfer_stage_seconds_total"))
        print("\n".join(line.split("transfer", 1)[-1] for line in stack.prefill.lines if "kv data path is open" in line))
        return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--gpus", default="0,0", help="of prefill and decode; empty: rehearse on the CPU")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--tp", default="1,1", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("what", choices=["chat", "kill", "load"])
    args = parser.parse_args()
    if args.gpus and shutil.which("nvidia-smi") is None:
        print("skipped: no GPU here")
        return 0
    cases = [json.loads(line) for line in CASES.read_text().splitlines() if line.strip()]
    return 0 if {"chat": run_chat, "kill": run_kills, "load": run_load}[args.what](args, cases) else 1


if __name__ == "__main__":
    sys.exit(main())
