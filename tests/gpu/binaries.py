"""Builds binaries for a machine with GPUs that has no cargo, and puts them, stripped, into a folder.

    python3 tests/gpu/binaries.py DIR NAME..

Those of an earlier build are gone first, so that what is there afterwards is what the sources of now gave; fails unless that is everything.
"""

import json, pathlib, shutil, subprocess, sys

# Name: cargo's command, package, kind and name of the target.
BINARIES = {
    "damask": ("build", "damask", "bin", "damask"),
    "driver": ("test", "device", "test", "driver"),
    "nccl": ("test", "device", "test", "nccl"),
    "kernels": ("test", "kernels", "test", "kernels"),
    "engine": ("test", "engine", "test", "cuda"),
    "contract": ("test", "transfer", "test", "contract"),
    "bench": ("bench", "kernels", "bench", "kernels"),
    "device_path": ("bench", "transfer", "bench", "device_path"),
}
COMMANDS = {"build": ["build", "--release"], "test": ["test", "--release", "--no-run"], "bench": ["bench", "--no-run"]}


def built(command, names):
    """{name: path} of what one call of cargo has built."""
    arguments = [*COMMANDS[command], "--message-format=json"]
    for package in sorted({BINARIES[name][1] for name in names}):
        arguments += ["--package", package]
    for name in names:
        arguments += [f"--{BINARIES[name][2]}", BINARIES[name][3]]
    cargo = subprocess.run(["cargo", *arguments], stdout=subprocess.PIPE, text=True)
    if cargo.returncode != 0:
        sys.exit(f"cargo {' '.join(arguments)} fails")
    found = {}
    for message in map(json.loads, cargo.stdout.splitlines()):
        target = message.get("target", {})
        for name in names:
            if message.get("executable") and [target["kind"][0], target["name"]] == list(BINARIES[name][2:]):
                found[name] = message["executable"]
    return found


def main(folder, *names):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in BINARIES:
        (folder / name).unlink(missing_ok=True)
    for command in COMMANDS:
        wanted = [name for name in names if BINARIES[name][0] == command]
        for name, path in (built(command, wanted) if wanted else {}).items():
            shutil.copy(path, folder / name)
            subprocess.run(["strip", folder / name], check=True)
            print(f"{(folder / name).stat().st_size:12,} {name}")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        sys.exit(f"cargo has named no executable for {', '.join(missing)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
