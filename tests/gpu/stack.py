"""Four services as processes of their own, in a layout of one card or two: what `kv_transfer.py` starts, asks and kills."""

import dataclasses, json, os, pathlib, random, re, shutil, signal, socket, subprocess, sys, tempfile, threading, time, urllib.request


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where prefill and decode compute. Cards are numbered as this process sees them; ranks share them where there are fewer."""
    prefill: dict
    decode: dict
    prefill_cards: str = "0,1"
    decode_cards: str = "0,1"

    def spins(self):
        """Whether ranks wait for each other within kernels."""
        alone = lambda degrees, cards: ranks(degrees) > 1 and ranks(degrees) == len(cards.split(","))
        return alone(self.prefill, self.prefill_cards) or alone(self.decode, self.decode_cards)

    def nccl(self):
        """Whether some pair of ranks is on two cards, so that `nccl` has something to do."""
        return self.prefill_cards != self.decode_cards or "," in self.prefill_cards

    def on_one_card(self):
        return dataclasses.replace(self, prefill_cards="0", decode_cards="0")


def degrees(tp, ep=1, dp=1):
    return {"tp": tp, "ep": ep, "dp": dp}


def ranks(degrees):
    return degrees["tp"] * degrees["dp"]


LAYOUTS = {
    "tp1-tp1-one-card": Layout(degrees(1), degrees(1), "0", "0"),
    "tp1-tp1": Layout(degrees(1), degrees(1), "0", "1"),
    "tp2-tp2": Layout(degrees(2), degrees(2)),
    "tp2-ep2tp2": Layout(degrees(2), degrees(2, ep=2)),
    "tp1-tp2": Layout(degrees(1), degrees(2), "0", "0,1"),
    "tp2-tp1": Layout(degrees(2), degrees(1), "0,1", "1"),
    "tp2-ep4tp4": Layout(degrees(2), degrees(4, ep=4)),
    "tp1-ep2dp2": Layout(degrees(1), degrees(1, ep=2, dp=2), "0", "0,1"),
    "tp2-ep4dp2tp2": Layout(degrees(2), degrees(2, ep=4, dp=2)),
}


def num_cards():
    """Cards that this process sees."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len([card for card in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if card])
    if shutil.which("nvidia-smi") is None:
        return 0
    return len(subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout.splitlines())


# Below the ports that systems give to outgoing connections: those could take one between here and the service that listens on it.
PORTS = iter(random.sample(range(10000, 32000), 20000))


def free_port():
    """One that nobody listens on now, and that this process has not handed out before."""
    for port in PORTS:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StackError("no port is free")


def get(address, path, timeout=2):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout) as answer:
        return answer.read().decode()


def visible(cards):
    """`cards` of this process, as the driver counts them."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(outer.split(",")[int(card)] for card in cards.split(",")) if outer else cards


class StackError(Exception):
    """A service that does not start, or does not end as it should."""


class Service:
    def __init__(self, stack, role, config, cards=None):
        self.stack, self.role, self.config, self.cards = stack, role, config, cards
        self.process, self.lines, self.was_killed = None, [], False

    def start(self):
        path = self.stack.folder / f"{self.role}.yaml"
        path.write_text(json.dumps(self.config))  # JSON is YAML
        env = dict(os.environ)
        if self.cards is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible(self.cards)
        command = [self.stack.binary, self.role, "--config", str(path), "--log-level", "info"]
        self.process, self.was_killed = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env), False
        threading.Thread(target=self.read, args=(self.process,), daemon=True).start()

    def read(self, process):
        for line in process.stderr:
            self.lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip()))

    def wait_ready(self, seconds=90):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise StackError(f"{self.role} ended with {self.process.returncode}:\n" + "\n".join(self.lines[-20:]))
            try:
                get(self.config["admin_listen"], "/health/ready")
                return
            except OSError:
                time.sleep(0.02)
        raise StackError(f"{self.role} is not ready:\n" + "\n".join(self.lines[-20:]))

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
        self.was_killed = True

    def metrics(self):
        """`{name and labels: value}` of one scrape."""
        text = get(self.config["admin_listen"], "/metrics")
        return {key: float(value) for key, value in re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", text, re.M)}

    def wait_pages_free(self, seconds=10):
        end = time.monotonic() + seconds
        while True:
            pages = {key: count for key, count in self.metrics().items() if key.startswith("damask_kv_pages{")}
            busy = {key: count for key, count in pages.items() if count and not re.search('state="(free|cached)"', key)}
            if not busy or time.monotonic() > end:
                return busy
            time.sleep(0.05)


class Stack:
    """`layout` `None` rehearses on the CPU. `transfer` is added to both workers' sections of that name. Without `reuse`, every prompt is computed
    whole, whatever came before."""

    def __init__(self, binary, layout, transport, hold=("none", 0), model="embedded-nano", transfer=None, reuse=False):
        self.binary, self.folder = binary, pathlib.Path(tempfile.mkdtemp(prefix="damask-kv-"))
        ports = {name: f"127.0.0.1:{free_port()}" for name in ["pg", "pa", "dg", "da", "dk", "rg", "ra", "gg", "ga"]}
        worker = {
            "model": model, "backend": "cuda", "page_tokens": 64, "max_context_tokens": 4096, "full_pages": 512,
            "numerics": {"compute": "bf16", "routing": "bf16", "kv": "bf16"},
            "transfer": {"transport": transport, "checksum_every": 1, "in_flight_bytes_max": 64 << 20, "allow_slow": True},
        }
        if layout is None:
            worker |= {"backend": "cpu", "numerics": {}, "page_tokens": 16}
        on = layout or LAYOUTS["tp1-tp1"]
        prefill = json.loads(json.dumps(worker)) | {
            "name": "prefill", "listen": ports["pg"], "admin_listen": ports["pa"], "layout": on.prefill, "chunk_tokens": 256,
            "ranks_per_gpu": ranks(on.prefill) // len(on.prefill_cards.split(",")),
            "prefix_reuse": reuse,
        }
        decode = json.loads(json.dumps(worker)) | {
            "name": "decode", "listen": ports["dg"], "admin_listen": ports["da"], "kv_listen": ports["dk"],
            "layout": on.decode, "max_sequences": 16, "ranks_per_gpu": ranks(on.decode) // len(on.decode_cards.split(",")),
        }
        if model != "embedded-nano":
            for config, pages in ((prefill, 1024), (decode, 6144)):
                config |= {"max_context_tokens": 16384, "full_pages": pages}
                config["transfer"] |= {"checksum_every": 16, "in_flight_bytes_max": 256 << 20}
            prefill["chunk_tokens"], decode["max_sequences"] = 2048, 40
        for config in (prefill, decode):
            config["transfer"] |= transfer or {}
        prefill["transfer"] |= {"hold_at": hold[0], "hold_ms": hold[1]}
        router = {"listen": ports["rg"], "admin_listen": ports["ra"], "workers": {"prefill": [ports["pg"]], "decode": [ports["dg"]]}}
        gateway = {"listen": ports["gg"], "admin_listen": ports["ga"], "router": ports["rg"], "model": model}
        cards = (on.prefill_cards, on.decode_cards) if layout else (None, None)
        self.prefill, self.decode = Service(self, "prefill", prefill, cards[0]), Service(self, "decode", decode, cards[1])
        self.router, self.gateway = Service(self, "router", router), Service(self, "gateway", gateway)
        self.services = [self.prefill, self.decode, self.router, self.gateway]
        self.url = ports["gg"]

    def __enter__(self):
        try:
            for service in self.services:
                service.start()
            for service in self.services:
                service.wait_ready()
        except StackError as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, _type, error, _traceback):
        """Ends the services. Each must end well: a worker that dies at its exit has answered everything before."""
        running = [service for service in reversed(self.services) if service.process is not None and not service.was_killed]
        for service in running:
            if service.process.poll() is None:
                service.process.terminate()
        wrong = []
        for service in running:
            try:
                if service.process.wait(10) != 0:
                    wrong.append(f"{service.role} ended with {service.process.returncode}:\n" + "\n".join(service.lines[-5:]))
            except subprocess.TimeoutExpired:
                wrong.append(f"{service.role} does not end by SIGTERM")
                service.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        if wrong and error is None:
            raise StackError("\n".join(wrong))
        for line in wrong:
            print(line, file=sys.stderr)

    def model(self):
        return json.loads(get(self.url, "/v1/models"))["data"][0]["id"]

    def data_paths(self):
        """One line for each pair of ranks that prefill has opened a data path for."""
        lines = [line for line in self.prefill.lines if "kv data path is open" in line]
        return [re.sub(r"^.*kv data path is open\s*", "", line) for line in lines]

    def completion(self, body, timeout):
        request = urllib.request.Request(
            f"http://{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=timeout)

    def chat(self, case, timeout=60, on_chunk=None):
        """(content, finish_reason, calls) of a streamed answer."""
        kwargs = {key: value for key, value in case["render"].items() if key != "reasoning_effort"}
        body = case["request"] | {"chat_template_kwargs": kwargs, "stream": True}
        content, finish, calls, chunks = "", None, {}, 0
        with self.completion(body, timeout) as answer:
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
