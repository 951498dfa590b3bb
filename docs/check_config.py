#!/usr/bin/env python3
"""Compares docs/config.md with the program: the page's tables must have every key of the four config files and no other, with the defaults that
`damask config print` says. Starts no service; needs nothing but Python 3.10.

usage: docs/check_config.py target/release/damask
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

PAGE = pathlib.Path(__file__).parent / "config.md"
BOTH_WORKERS = "Both workers"
# For each service a file that gives what must be given, and every section that may be absent, so that all keys are printed. A new one goes in here.
FILES = {
    "gateway": """
listen: 127.0.0.1:1
admin_listen: 127.0.0.1:2
router: 127.0.0.1:3
model: embedded-nano
tls: { certificate: a, key: b }
api_keys: [{ name: a, sha256: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad }]
responses_store: {}
""",
    "router": "workers: { prefill: ['a:1'], decode: ['b:1'] }",
    "prefill": "{}",
    "decode": "{}",
}
# What the page must say of the keys that these files give.
GIVEN = {
    "gateway": {
        **dict.fromkeys(["listen", "admin_listen", "router", "model", "tls.certificate", "tls.key"], "required"),
        **dict.fromkeys(["api_keys[].name", "api_keys[].sha256"], "required"),
        "tls": "none",
        "api_keys": "[]",
        "responses_store": "none",
    },
    "router": {"workers.prefill": "required", "workers.decode": "required"},
    "prefill": {},
    "decode": {},
}


def keys_of(text: str) -> dict[str, str]:
    """Every key of a printed config by its path, with its value; sections and lists that have elements are left out."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # the sections and lists around a line: indent, path
    for line in text.splitlines():
        body = line.lstrip(" ")
        indent = len(line) - len(body)
        if body.startswith("- "):  # an element, as deep as the list's own key
            while above[-1][0] > indent:
                above.pop()
            above[-1] = (indent, above[-1][1].removesuffix("[]") + "[]")
            indent, body = indent + 2, body[2:]
        key = re.fullmatch(r"(\w+):(?: (.*))?", body)
        if not key:
            continue  # an element without keys
        while above and above[-1][0] >= indent:
            above.pop()
        path = f"{above[-1][1]}.{key[1]}" if above else key[1]
        if key[2] is None:
            above.append((indent, path))
        else:
            found[path] = "none" if key[2] == "null" else key[2].strip("'\"")
    return found


def of_the_program(binary: str, service: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DAMASK_")}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(FILES[service])
        file.flush()
        command = [binary, "config", "print", service, file.name]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{service}: {run.stderr}")
    return keys_of(run.stdout) | GIVEN[service]


def of_the_page() -> dict[str, dict[str, str]]:
    """Keys and defaults of each table, by heading."""
    tables: dict[str, dict[str, str]] = {heading: {} for heading in [*FILES, BOTH_WORKERS]}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        row = re.match(r"\| `([\w.\[\]]+)` \| ([^|]+) \|", line)
        if row and heading in tables:
            if row[1] in tables[heading]:
                raise SystemExit(f"{heading}: {row[1]} stands there twice")
            tables[heading][row[1]] = row[2].strip("` ")
    return tables


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    tables = of_the_page()
    faults, num_keys = [], 0
    for service in FILES:
        page = tables[service] | (tables[BOTH_WORKERS] if service in ("prefill", "decode") else {})
        program = of_the_program(sys.argv[1], service)
        num_keys += len(page)
        for key in sorted(page.keys() | program.keys()):
            on_page, in_program = page.get(key, "not there"), program.get(key, "not there")
            if on_page != in_program:
                faults.append(f"{service}: {key} is {on_page} on the page, {in_program} in the program")
    print("\n".join(faults) or f"{PAGE.name}: {num_keys} keys, all as in the program")
    if faults:
        raise SystemExit(f"{PAGE.name}: {len(faults)} faults")


if __name__ == "__main__":
    main()
