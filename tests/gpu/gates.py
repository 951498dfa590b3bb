"""What `two_gpus.sh` reads out of tables, as lines PASS or FAIL; exits with 1 for a FAIL, and for tables that are not there.

    gates.py path FILE                  a table of the bench device_path
    gates.py all-reduce FILE            tables of the bench all_reduce
    gates.py sweep DIR                  files of `damask sweep`
"""

import json, pathlib, re, sys

RATE_GB_PER_S = 300
SUM_US = {1: 5, 2: 5, 4: 5, 8: 5, 32: 7}  # by tokens
TAIL_US = 2000
# vLLM 0.23.0 with TP2 on the same kind of machine, same shapes and precision: ms of a decode step of 120b by batch, context 1024.
VLLM_TP2_MS = {1: 3.94, 8: 6.3, 32: 11.6}

passed = []


def gate(ok, what):
    print("PASS" if ok else "FAIL", what)
    passed.append(ok)


def tables(path):
    """Each table of a Markdown file, as rows of cells, the head first."""
    found, rows = [], []
    for line in [*pathlib.Path(path).read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            found.append([row for row in rows if not re.fullmatch(r"-+", row[0])])
            rows = []
    return found


def path(file):
    [[head, *rows]] = tables(file)
    at = {name: head.index(name) for name in ("tokens", "handed over", "us, median", "GB/s")}
    if {"tail" in row[at["handed over"]] for row in rows} != {True, False}:
        raise ValueError("rows of both kinds are needed")
    for row in rows:
        tokens, what, us, rate = (row[at[name]] for name in ("tokens", "handed over", "us, median", "GB/s"))
        if "tail" in what:
            gate(float(us) < TAIL_US, f"{tokens} tokens behind layers, idle: complete {us} us behind the last one (below {TAIL_US})")
        else:
            gate(float(rate) >= RATE_GB_PER_S, f"{tokens} tokens at once, idle: {rate} GB/s (at least {RATE_GB_PER_S})")


def all_reduce(file):
    ours, nccl = {}, {}
    for head, *rows in tables(file):
        target = ours if "packets" in head else nccl if "experts, sum, norm" in head else None
        if target is not None:
            target.update({int(row[0]): dict(zip(head, row)) for row in rows})
    best = lambda row, names: min(float(row[name]) for name in names if row[name])
    for tokens, most in SUM_US.items():
        us = best(ours[tokens], ("packets", "bulk"))
        gate(us < most, f"sum of {tokens} tokens over two cards: {us} us (below {most})")
    if not nccl:
        raise ValueError("no table of NCCL's sums")
    for tokens, row in nccl.items():
        fused, apart = best(ours[tokens], ("packets, experts, norm", "bulk, experts, norm")), float(row["experts, sum, norm"])
        gate(fused < apart, f"experts, sum, norm of {tokens} tokens: {fused} us in one kernel, {apart} us by NCCL and two")


def sweep(folder):
    def steps(layout):
        file = pathlib.Path(folder) / f"120b-{layout}.json"
        cells = json.loads(file.read_text())["cells"] if file.exists() else []
        return {cell["batch"]: cell["ms"] for cell in cells if cell["phase"] == "decode" and cell["context"] == 1024}

    one, two = steps("tp1-ep1-dp1"), [steps("tp2-ep1-dp1"), steps("tp2-ep2-dp1")]
    for batch, theirs in VLLM_TP2_MS.items():
        ours = min((layout[batch] for layout in two if batch in layout), default=float("nan"))
        alone = one.get(batch, float("nan"))
        gate(ours < theirs and ours < alone, f"120b decode step at batch {batch}: {ours:.2f} ms on two cards, {alone:.2f} on one, vLLM's {theirs} on two")


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    try:
        {"path": path, "all-reduce": all_reduce, "sweep": sweep}[what](*arguments)
    except (OSError, ValueError, KeyError, IndexError) as error:
        gate(False, f"{what}: not the tables that are wanted ({type(error).__name__}: {error})")
    sys.exit(0 if passed and all(passed) else 1)
