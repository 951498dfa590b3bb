"""KV between real processes on GPUs: the chat cases of gpt-oss-nano in every layout of one card or two, workers killed in every phase, and load.

    python3 tests/gpu/kv_transfer.py target/release/damask chat                       # every layout over auto, and over nccl
    python3 tests/gpu/kv_transfer.py target/release/damask --layout tp1-tp1 --transport nccl --kills 20 kill
    python3 tests/gpu/kv_transfer.py target/release/damask --layout tp1-tp1 --transport ipc load

Needs nothing but Python; says that it was skipped where there is no GPU, and where there is one, the ranks of all layouts share it. Prints tables, a line PASS or FAIL for each gate, and exits with 1 for a FAIL.
`chat`: every case must be answered as the case file says, one by one and then eight at a time, and all pages be free afterwards; with `--reuse`
by a prefill that computes of each prompt only what it has not computed before.
`kill`: a worker is killed (SIGKILL) before the first batch is announced, between two batches, behind the COMMIT, or while its sequence
generates; the other one must keep its process, answer by a new incarnation within 5 s of that one's readiness, and have all its pages free at the end.
`load`: gpt-oss-20b with random weights; sequences decode while prompts of 8k tokens are prefilled and sent, one after the other, and beside that nothing, and
beside prompts that are prefilled and not sent (one token is asked for). Times are those of the workers' own metrics: of each prompt, and of decode steps in
windows of 100 ms; the table has their medians.
"""

import argparse, concurrent.futures, json, os, pathlib, re, sys, threading, time, urllib.error
from stack import LAYOUTS, Stack, StackError, num_cards, ranks

HERE = pathlib.Path(__file__).resolve().parent
CASES = HERE.parent / "fixtures/nano/chat.jsonl"
HOLD_MS = 300
PHASES = {"before_ready": "announce", "mid_transfer": "second", "after_commit": "commit", "generating": "none"}
CLIENTS = 8
ANSWER_S = 5  # of a new incarnation, from its readiness
COMPLETE_MS, STEP_SLOWER, FIRST_SLOWER = 2.0, 0.05, 0.02


def gate(ok, what):
    print("PASS" if ok else "FAIL", what, flush=True)
    return ok


def median(values):
    return sorted(values)[len(values) // 2] if values else float("nan")


def mean(values):
    return sum(values) / len(values) if values else float("nan")


def check(case, answer):
    expect, (content, finish, calls) = case["expect"], answer
    loads = lambda arguments: json.loads(arguments) if isinstance(arguments, str) else arguments
    wanted = [(call["name"], loads(call["arguments"])) for call in expect["message"].get("tool_calls") or []]
    found = [(call["name"], loads(call["arguments"] or "null")) for call in calls]
    if (content, finish, found) != (expect["message"].get("content") or "", expect["finish_reason"], wanted):
        return f"{case['id']}: wanted {(expect['message'].get('content'), expect['finish_reason'], wanted)}, got {(content, finish, found)}"
    return None


# --- chat ---------------------------------------------------------------------------------------------------------------


def chat_of(args, cases, name, transport):
    """(row of the table, complaints) of one layout over one transport."""
    started = time.monotonic()
    answered = lambda stack, case: check(case, stack.chat(case))
    try:
        with Stack(args.binary, LAYOUTS.get(name), transport, transfer=args.transfer, reuse=args.reuse) as stack:
            ready = time.monotonic()
            wrong = [answered(stack, case) for case in cases]
            with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
                wrong += pool.map(lambda case: answered(stack, case), cases)
            done = time.monotonic()
            wrong = [line for line in wrong if line]
            busy = {service.role: service.wait_pages_free() for service in (stack.prefill, stack.decode)}
            complaints = wrong + [f"pages not free: {role} {pages}" for role, pages in busy.items() if pages]
            reached = {rank for line in stack.data_paths() for rank in re.findall(r"receiver_rank=(\d+)", line)}
            if reached and len(reached) != ranks(stack.decode.config["layout"]):
                complaints.append(f"data paths to decode's ranks {sorted(reached)} alone")
            reused = int(stack.prefill.metrics().get("damask_prefix_reused_tokens_total", 0))
            metrics, paths = stack.decode.metrics(), sorted({word for line in stack.data_paths() for word in line.split() if word.startswith("path=")})
    except (OSError, StackError) as error:
        return f"| {name} | {transport} | - | - | - | - | - | - | - | {time.monotonic() - started:.0f} |", [str(error)]
    moved = metrics.get('damask_transfer_stage_bytes_total{stage="move"}', 0) / 1e6
    compared, corrupt = (int(metrics.get(f"damask_transfer_{what}_total", 0)) for what in ("checksums_compared", "batches_corrupt"))
    if (reused > 0) != args.reuse:
        complaints.append(f"{reused} prompt tokens were reused")
    if corrupt:
        complaints.append(f"{corrupt} batches with a wrong checksum")
    ways = " and ".join(path.removeprefix("path=").strip('"') for path in paths) or "host"
    return (f"| {name} | {transport} | {ways} | {2 * len(cases)} | {len(wrong)} | {reused} | {moved:.1f} | {compared} | {corrupt} "
            f"| {ready - started:.0f} + {done - ready:.0f} |"), complaints


def run_chat(args, cases):
    transports = args.transport.split(",") if args.transport else ["auto", "nccl"]
    on = lambda name: LAYOUTS.get(name, LAYOUTS["tp1-tp1-one-card"])
    runs = [(name, transport) for name in args.layouts for transport in transports if transport != "nccl" or on(name).nccl()]
    # Those whose kernels wait for each other have the cards for themselves: processes take turns on a card.
    alone, together = [run for run in runs if on(run[0]).spins()], [run for run in runs if not on(run[0]).spins()]
    print("| layout | transport | way | answers | wrong | prompt tokens reused | KV moved, MB | checksums compared | batches corrupt | s to start + to answer |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    complaints = {}
    with concurrent.futures.ThreadPoolExecutor(max(len(together), 1)) as pool:
        for run, (row, wrong) in zip(together, pool.map(lambda run: chat_of(args, cases, *run), together)):
            print(row, flush=True)
            complaints[run] = wrong
    for run in alone:
        row, complaints[run] = chat_of(args, cases, *run)
        print(row, flush=True)
    for run, wrong in complaints.items():
        if wrong:
            print(f"{run}: {len(wrong)} complaints, the first ones:", *wrong[:3], sep="\n  ")
    reuse = ", prompts reused" if args.reuse else ""
    return all([gate(not wrong, f"chat {name} over {transport}{reuse}") for (name, transport), wrong in complaints.items()])


# --- kills --------------------------------------------------------------------------------------------------------------


def kill_once(stack, role, phase, cases):
    """(milliseconds to the first answer by the new incarnation, complaint, how the request that was cut ended)"""
    victim, survivor = (stack.prefill, stack.decode) if role == "prefill" else (stack.decode, stack.prefill)
    pid, seen = survivor.process.pid, len(stack.prefill.lines)
    case, killed = max(cases, key=lambda case: len(case["completion_token_ids"])), threading.Event()

    def at_chunk(count):
        if phase == "generating" and count == 2 and not killed.is_set():
            victim.kill()
            killed.set()

    outcome = []

    def ask_case():
        try:
            outcome.append(check(case, stack.chat(case, on_chunk=at_chunk)) or "answered")
        except (OSError, urllib.error.URLError) as error:
            outcome.append(f"failed: {error}"[:60])

    asking = threading.Thread(target=ask_case)
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
            complaint = check(cases[0], stack.chat(cases[0], timeout=10))
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
    if not complaint and millis > 1e3 * ANSWER_S:
        complaint = f"later than {ANSWER_S} s"
    return millis, complaint, outcome


def run_kills(args, cases):
    pairs, transport = [(role, phase) for phase in PHASES for role in ("prefill", "decode")], args.transport or "auto"
    [name] = args.layouts
    done, failed = 0, 0
    print(f"kills over {transport}, {name}\n")
    print("| killed | phase | answer of the new incarnation after, ms | of which held by the test | the request that was cut | |\n|---|---|---|---|---|---|")
    for phase, hold in PHASES.items():
        of_phase = [(role, phase) for i in range(args.kills) for role, its in [pairs[i % len(pairs)]] if its == phase]
        if not of_phase:
            continue
        hold_ms = HOLD_MS if hold != "none" else 0
        with Stack(args.binary, LAYOUTS.get(name), transport, (hold, hold_ms), transfer=args.transfer) as stack:
            for role, _ in of_phase:
                held = lambda: sum("held at" in line for line in stack.prefill.lines)
                before = held()
                millis, complaint, outcome = kill_once(stack, role, phase, cases)
                done, failed = done + 1, failed + bool(complaint)
                holds = max(held() - before - 1, 0) * hold_ms  # the first one is the one in which it was killed
                print(f"| {role} | {phase} | {millis:.0f} | {holds} | {outcome[0] if outcome else 'open'} | {complaint or 'ok'} |", flush=True)
                if complaint:
                    break
    return gate(failed == 0 and done == args.kills, f"kills over {transport}, {name}: {done} of {args.kills} done, {failed} failed")


# --- load ---------------------------------------------------------------------------------------------------------------


class Means:
    """Means of a worker's histograms between two scrapes, in ms."""

    def __init__(self, service, names):
        self.service, self.names, self.before = service, names, service.metrics()

    def step(self):
        """One mean for each name, `None` where nothing was observed since the last call."""
        now, found = self.service.metrics(), []
        for name, labels in self.names:
            total, count = (now.get(f"{name}_{part}{labels}", 0) - self.before.get(f"{name}_{part}{labels}", 0) for part in ("sum", "count"))
            found.append(1e3 * total / count if count else None)
        self.before = now
        return found


def ask(stack, prompt_words, max_tokens, seed, stop=None):
    """Streams an answer and drops it."""
    prompt = " ".join(str((seed * 7919 + i * 104729) % 1000) for i in range(prompt_words))
    body = {"model": stack.model(), "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True, "seed": seed,
            "temperature": 1.0, "logit_bias": {"200002": -100, "200007": -100, "200012": -100}}
    try:
        with stack.completion(body, 120) as answer:
            for _ in answer:
                if stop is not None and stop.is_set():
                    break
    except OSError as error:
        print("request failed:", error, getattr(error, "read", lambda: b"")()[:200])


PROMPT_PARTS = [("damask_first_token_seconds", ""), ("damask_transfer_complete_seconds", "")] + [
    ("damask_transfer_tail_part_seconds", f'{{part="{part}"}}') for part in ("announce", "land", "join")]


def load_row(args, stack, what, max_tokens):
    """{column: values} while sequences decode beside prompts of `max_tokens` tokens of answer; 0: beside none."""
    stop = threading.Event()
    streams = [threading.Thread(target=ask, args=(stack, 40, 4000, seed, stop)) for seed in range(args.sequences)]
    [stream.start() for stream in streams]
    time.sleep(2)  # all of them decode
    steps, over = [], threading.Event()

    def watch():
        means = Means(stack.decode, [("damask_step_seconds", "")])
        while not over.wait(0.1):
            steps.extend(value for value in means.step() if value)

    watching = threading.Thread(target=watch)
    watching.start()
    columns = {name: [] for name in PROMPT_PARTS}
    means, end, prompts = Means(stack.prefill, PROMPT_PARTS), time.monotonic() + args.seconds, 0
    while time.monotonic() < end:
        if max_tokens:
            ask(stack, 3400, max_tokens, 1000 + prompts)
            prompts += 1
            for name, value in zip(PROMPT_PARTS, means.step()):
                columns[name] += [value] if value is not None else []
        else:
            time.sleep(0.1)
    over.set()
    watching.join()
    running = stack.decode.metrics().get('damask_sequences{state="running"}')
    stop.set()
    [stream.join() for stream in streams]
    cell = lambda values, digits: f"{median(values):.{digits}f} ({mean(values):.{digits}f})" if values else "-"
    first, complete, announce, land, join = (columns[name] for name in PROMPT_PARTS)
    print(f"| {what} | {running:.0f} | {cell(steps, 3)} | {prompts} | {cell(first, 2)} | {cell(complete, 3)} | {cell(announce, 3)} "
          f"| {cell(land, 3)} | {cell(join, 2)} |", flush=True)
    stack.decode.wait_pages_free()
    return {"step": steps, "first": first, "complete": complete}


def run_load(args, _):
    transport, [name] = args.transport or "auto", args.layouts
    kinds = {"nothing": 0, "8k prompts, not sent": 1, "8k prompts, sent": 2}
    found = {what: {"step": [], "first": [], "complete": []} for what in kinds}
    with Stack(args.binary, LAYOUTS[name], transport, model="random:20b:7", transfer=args.transfer) as stack:
        for seed in range(2):  # opens the lane
            ask(stack, 3400, 2, 900 + seed)
        print(f"{name} over {transport}, {args.sequences} sequences decoding, {args.transfer or 'default settings'}; medians (means) in ms\n")
        print("| beside them | running | decode step, launch to output | prompts | first token | KV complete behind last layer "
              "| of which to last announcement | from there to landed | then until joined |\n|---|---|---|---|---|---|---|---|---|", flush=True)
        for _ in range(args.rounds):
            for what, max_tokens in kinds.items():
                for column, values in load_row(args, stack, what, max_tokens).items():
                    found[what][column] += values
        metrics = stack.decode.metrics() | {key: value for key, value in stack.prefill.metrics().items() if "gather" in key}
        rates = {}
        for stage in ("gather", "move", "scatter"):
            moved, seconds = (metrics.get(f'damask_transfer_stage_{what}_total{{stage="{stage}"}}', 0) for what in ("bytes", "seconds"))
            rates[stage] = f"{moved / seconds / 1e9:.0f}" if seconds else "-"
        print("stages, GB/s:", rates, *stack.data_paths(), sep="\n")
    nothing, unsent, sent = (found[what] for what in kinds)
    slower = median(sent["step"]) / median(nothing["step"]) - 1
    later = median(sent["first"]) / median(unsent["first"]) - 1
    if set(LAYOUTS[name].prefill_cards.split(",")) & set(LAYOUTS[name].decode_cards.split(",")):
        print("no gates: prefill and decode take turns on a card")
        return True
    return all([
        gate(median(sent["complete"]) < COMPLETE_MS, f"KV complete {median(sent['complete']):.3f} ms behind the last layer, median (below {COMPLETE_MS})"),
        gate(slower < STEP_SLOWER, f"decode step {100 * slower:+.1f} % beside prompts that are sent, median (below {100 * STEP_SLOWER:.0f} %)"),
        gate(later < FIRST_SLOWER, f"first token {100 * later:+.1f} % by sending, median (below {100 * FIRST_SLOWER:.0f} %)"),
    ])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--layout", default="all", help=f"of {', '.join(LAYOUTS)}; chat takes several, and all; kill and load take tp1-tp1 by default")
    parser.add_argument("--transport", help="of auto, ipc, nccl, host; chat takes several; default auto, for chat auto,nccl")
    parser.add_argument("--transfer", type=json.loads, help="further settings of both workers' section transfer, as JSON")
    parser.add_argument("--reuse", action="store_true", help="chat: prompts that begin like earlier ones compute only what is new")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=32, help="that decode in load")
    parser.add_argument("--seconds", type=float, default=4, help="of each row of load")
    parser.add_argument("--rounds", type=int, default=2, help="of load's three rows")
    parser.add_argument("what", choices=["chat", "kill", "load"])
    args = parser.parse_args()
    args.layouts = args.layout.split(",") if args.layout != "all" else list(LAYOUTS) if args.what == "chat" else ["tp1-tp1"]
    unknown = [name for name in args.layouts if name not in LAYOUTS and name != "cpu"]
    if unknown:
        parser.error(f"no layout {unknown[0]}")
    cards, promised = num_cards(), int(os.environ.get("DAMASK_TEST_GPUS", 0))
    if args.layouts != ["cpu"] and cards < promised:
        gate(False, f"{args.what}: {cards} GPUs, {promised} were promised")
        return 1
    if args.layouts != ["cpu"] and cards == 0:
        print("skipped: no GPU here (--layout cpu rehearses)")
        return 0
    if cards == 1:
        LAYOUTS.update({name: layout.on_one_card() for name, layout in LAYOUTS.items()})
    cases = [json.loads(line) for line in CASES.read_text().splitlines() if line.strip()]
    try:
        return 0 if {"chat": run_chat, "kill": run_kills, "load": run_load}[args.what](args, cases) else 1
    except StackError as error:
        gate(False, f"{args.what}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
