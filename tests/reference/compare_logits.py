#!/usr/bin/env python3
"""Logits of the CUDA engine, and of transformers' GptOssForCausalLM in bf16, against a float32 run.

  cargo build --release -p engine --example logits
  compare_logits.py target/release/examples/logits [--work /dev/shm]

Makes a checkpoint of the 20b shape with random weights (make_checkpoint.py, 13.8 GB), runs a prompt of 2000 tokens and 64
decode steps with given tokens through all three, and compares the last 64 positions of the prompt and the decoded ones. The
float32 run is make_checkpoint's own forward pass. Two correct bf16 engines differ from it by flipped experts above all:
what counts is that our error is no larger than transformers'. Exit status 1 if it is more than 1.5 times that.

Needs torch, transformers, a GPU with 60 GB and 16 GB under --work.
"""
import argparse
import os
import subprocess
import sys

import torch
from transformers import GptOssForCausalLM, Mxfp4Config

import make_checkpoint

PROMPT, STEPS, LAST, SEED, ALLOWED = 2000, 64, 64, 0, 1.5


def ours(binary, checkpoint, ids, work, vocab):
    tokens, out = os.path.join(work, "tokens.u32"), os.path.join(work, "logits.f32")
    with open(tokens, "wb") as file:
        file.write(ids.to(torch.int32).numpy().tobytes())
    subprocess.check_call([binary, checkpoint, tokens, str(PROMPT), out])
    with open(out, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.float32).view(LAST + STEPS, vocab)


def float32(config, ids):
    torch.backends.cuda.matmul.allow_tf32 = False
    specs = make_checkpoint.tensor_specs(config)
    get = lambda name: make_checkpoint.make_tensor(name, specs[name], SEED, "cuda:0")
    return make_checkpoint.forward(config, get, ids.cuda())[-(LAST + STEPS):].cpu()


def transformers_bf16(checkpoint, ids):
    model = GptOssForCausalLM.from_pretrained(
        checkpoint, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16, device_map="cuda:0",
        attn_implementation="eager")
    return model(ids.cuda()[None], logits_to_keep=LAST + STEPS).logits[0].float().cpu()


def report(name, logits, want):
    error, want = logits.double() - want.double(), want.double()
    share = lambda rows: (error[rows].norm() / want[rows].norm()).item()
    cosine = torch.nn.functional.cosine_similarity(logits.double(), want, dim=1)
    equal = (logits.argmax(1) == want.argmax(1)).double().mean().item()
    print(f"{name}: relative error {share(slice(None)):.4f} (prompt {share(slice(LAST)):.4f}, decode "
          f"{share(slice(LAST, None)):.4f}), cosine mean {cosine.mean():.5f}, least {cosine.min():.5f}, "
          f"first token equal at {100 * equal:.0f} % of positions")
    return share(slice(None))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="the example `logits` of the crate engine")
    parser.add_argument("--work", default="/dev/shm", help="folder for checkpoint and logits")
    arguments = parser.parse_args()
    checkpoint = os.path.join(arguments.work, "random-20b")
    maker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "make_checkpoint.py")
    subprocess.check_call([sys.executable, maker, "--size", "20b", "--seed", str(SEED), "--out", checkpoint])
    config = make_checkpoint.make_config("20b", {})
    ids = torch.randint(0, config["vocab_size"], (PROMPT + STEPS,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        damask = ours(arguments.binary, checkpoint, ids, arguments.work, config["vocab_size"])
        want = float32(config, ids)
        torch.cuda.empty_cache()
        ratio = report("damask", damask, want) / report("transformers", transformers_bf16(checkpoint, ids), want)
    print(f"our error is {ratio:.2f} times transformers', allowed is {ALLOWED}")
    return int(not ratio <= ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
