"""Decode with data-parallel attention behind a real prefill: the chat cases of gpt-oss-nano over each transport, and workers killed.

    python3 tests/gpu/attention_groups.py target/release/damask --gpus 0,1 --layout 1,2,2 --transport ipc
    python3 tests/gpu/attention_groups.py target/release/damask --gpus 0,1 --layout 2,4,2 --transport auto --kills 4

`--layout TP,EP,DP` is decode's, over all of `--gpus`, which more ranks share evenly; prefill is on the first GPU. Every case must be answered as the
case file says, and all pages of every group be free at the end; between GPUs, a data path must have been opened to each group. Says that it was
skipped where there is no GPU; with `--gpus ''` it rehearses on the CPU.
"""

import argparse, json, re, shutil, sys

import kv_transfer
from kv_transfer import CASES, Stack, get


class GroupStack(Stack):
    """`kv_transfer`'s, with decode on all GPUs."""
    layout = (1, 2, 2)
    taken = set()

    def __init__(self, binary, gpus, transport, hold="none", tp=None):  # `layout` says it
        devices = gpus.split(",") if gpus else []
        super().__init__(binary, f"{devices[0]},{devices[-1]}" if gpus else "", transport, hold)
        tp, ep, dp = self.layout
        self.decode.config |= {"layout": {"tp": tp, "ep": ep, "dp": dp}}
        if gpus:
            self.decode.config["ranks_per_gpu"] = tp * dp // len(devices)
            self.decode.gpu = gpus

    def __exit__(self, *exception):
        rates = re.findall(r'receiver_rank="(\d+)"', get(self.decode.config["admin_listen"], "/metrics"))
        self.taken.update(int(rank) // self.layout[0] for rank in rates)
        super().__exit__(*exception)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--gpus", default="0,1")
    parser.add_argument("--layout", default="1,2,2")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--kills", type=int, default=0)
    args = parser.parse_args()
    if args.gpus and shutil.which("nvidia-smi") is None:
        print("skipped: no GPU here")
        return
    args.tp, kv_transfer.Stack = None, GroupStack
    GroupStack.layout = tuple(map(int, args.layout.split(",")))
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    print("decode layout TP, EP, DP:", args.layout)
    passed = kv_transfer.run_chat(args, cases)
    if args.gpus and args.transport != "host":
        groups = GroupStack.layout[2]
        print(f"data paths to groups {sorted(GroupStack.taken)} of {groups}")
        passed &= GroupStack.taken == set(range(groups))
    if args.kills:
        passed &= kv_transfer.run_kills(args, cases)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
