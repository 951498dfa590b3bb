"""The scripts that need GPUs, in miniature: what they build, run and serve is replaced by stand-ins. Run by check.sh."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS_PASS = 'echo "running 3 tests"; echo "test result: ok. 3 passed; 0 failed; 0 ignored"'
GPU_DIR = ROOT / "tests/gpu"

PATH_TABLE = """
| tokens | MB | handed over | us, median | worst | GB/s |
|---|---|---|---|---|---|
| 8192 | 300 | behind layers; tail | 900 | 990 | - |
| 8192 | 300 | all at once | 800 | 820 | 350 |
"""


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.bin = self.folder / "bin"
        self.bin.mkdir()

    def program(self, name, script):
        """A stand-in, on PATH."""
        file = self.bin / name
        file.write_text(f"#!/usr/bin/env bash\n{script}\n")
        file.chmod(0o755)

    def run_script(self, *command, **environment):
        environment = os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1"} | environment
        return subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    def gates(self, part, gpus="2"):
        """(exit code, lines PASS or FAIL) of a part of two_gpus.sh."""
        done = self.run_script(GPU_DIR / "two_gpus.sh", "run", self.bin, self.folder / "out", part, DAMASK_TEST_GPUS=gpus)
        return done.returncode, (self.folder / "out/gates.txt").read_text().splitlines()


class Gates(Case):
    def table(self, what, text):
        file = self.folder / "table.md"
        file.write_text(text)
        return self.run_script("python3", GPU_DIR / "gates.py", what, file)

    def test_a_table_that_is_good_passes(self):
        done = self.table("path", PATH_TABLE)
        self.assertEqual((done.returncode, done.stdout.count("PASS"), done.stdout.count("FAIL")), (0, 2, 0), done)

    def test_a_value_that_misses_its_gate_fails(self):
        done = self.table("path", PATH_TABLE.replace("350", "299"))
        self.assertEqual((done.returncode, done.stdout.count("PASS"), done.stdout.count("FAIL")), (1, 1, 1), done)

    def test_without_its_table_every_gate_fails(self):
        head = "\n".join(PATH_TABLE.splitlines()[:3])
        for what, text in [("path", ""), ("path", head), ("path", "\n".join(PATH_TABLE.splitlines()[:4])), ("all-reduce", ""), ("sweep", "")]:
            done = self.table(what, text)
            self.assertEqual(done.returncode, 1, (what, text, done))
            self.assertIn("FAIL", done.stdout, (what, text))


class TwoGpus(Case):
    def test_a_suite_that_passes(self):
        self.program("contract", f'[ "$DAMASK_TEST_GPUS" = 2 ] && {TESTS_PASS}')
        self.assertEqual(self.gates("contract"), (0, ["PASS contract: test result: ok. 3 passed; 0 failed; 0 ignored"]))

    def test_a_suite_of_no_tests_fails(self):
        self.program("contract", TESTS_PASS.replace("3", "0"))
        code, [line] = self.gates("contract")
        self.assertEqual((code, line[:5]), (1, "FAIL "), line)

    def test_a_suite_that_crashes_behind_its_tests_fails(self):
        self.program("engine", f'[ -d "$NANO_FIXTURES" ] && {TESTS_PASS}; kill -SEGV $$')
        code, [line] = self.gates("engine")
        self.assertEqual((code, line[:5]), (1, "FAIL "), line)

    def test_tests_on_one_card_are_promised_one(self):
        for name in ("kernels", "driver", "nccl"):
            wanted = 'commas=${CUDA_VISIBLE_DEVICES//[^,]/}; [ "$DAMASK_TEST_GPUS" = $((${#commas} + 1)) ]'
            self.program(name, f"{wanted} && {TESTS_PASS}")
        code, lines = self.gates("kernels")
        self.assertEqual((code, len(lines)), (0, 5), lines)

    def test_on_one_card_no_test_is_promised_two(self):
        for name in ("kernels", "driver"):
            self.program(name, f'[ "$DAMASK_TEST_GPUS" = 1 ] && {TESTS_PASS}')
        code, lines = self.gates("kernels", gpus="1")
        self.assertEqual((code, len(lines)), (0, 3), lines)

    def test_one_of_two_scripts_that_crashes_fails(self):
        # The script of one transport passes, the other's ends with a traceback.
        self.program("python3", 'case "$*" in *nccl*) echo Traceback; exit 1 ;; *) echo "PASS kills" ;; esac')
        code, lines = self.gates("kills")
        self.assertEqual(code, 1)
        self.assertEqual([line for line in lines if line.startswith("FAIL")], ["FAIL kills over nccl: the script's end"])

    def test_a_part_that_crashes_behind_a_gate_fails(self):
        self.program("python3", 'echo "PASS the first"; kill -SEGV $$')
        code, lines = self.gates("load")
        self.assertEqual((code, lines), (1, ["FAIL load: exit code 139", "PASS the first"]))

    def test_chat_fails_with_either_of_its_runs(self):
        for run in ('"$*" = *--reuse*', '"$*" != *--reuse*'):
            self.program("python3", f'echo "PASS a run"; [[ {run} ]] && kill -SEGV $$; exit 0')
            self.assertEqual(self.gates("chat"), (1, ["FAIL chat: exit code 139", "PASS a run", "PASS a run"]), run)

    def test_a_scheme_that_fails_is_named(self):
        self.program("python3", 'echo "PASS chat x"; [ "$DAMASK_DECODE__WEIGHTS__EXPERTS/$DAMASK_PREFILL__WEIGHTS__DENSE" != fp8/fp8 ]')
        code, lines = self.gates("schemes")
        self.assertEqual((code, [line for line in lines if line.startswith("FAIL")], len(lines)), (1, ["FAIL schemes: fp8/fp8"], 10))
        self.assertIn("PASS chat x mxfp4/fp8", [" ".join(line.split()) for line in lines])

    def test_groups_are_swept_without_prompts(self):
        self.program("damask", f'echo "$*" >>{self.folder}/calls; [[ $1 = plan || "$*" != *"--dp 2"* || "$*" = *"--prompts none"* ]]')
        _, lines = self.gates("sweep")
        swept = [line for line in lines if "sweep " in line]
        self.assertEqual([line[:5] for line in swept], ["PASS "] * 8, lines)
        calls = (self.folder / "calls").read_text().splitlines()
        self.assertEqual(sum("--prompts 1024,8192" in call for call in calls), 6, calls)

    def test_fewer_cards_than_promised_fail(self):
        script = [GPU_DIR / "kv_transfer.py", "damask", "chat"]
        done = self.run_script("python3", *script, CUDA_VISIBLE_DEVICES="0", DAMASK_TEST_GPUS="2")
        self.assertEqual((done.returncode, done.stdout), (1, "FAIL chat: 1 GPUs, 2 were promised\n"), done)


class Services(Case):
    def stack(self, worker):
        """What a stack says at its end whose workers are this script."""
        self.program("damask", worker)
        code = f"""
import subprocess, sys
sys.path.insert(0, {str(GPU_DIR)!r})
from stack import Stack, StackError
stack = Stack("damask", None, "auto")
for service in stack.services[:2]:
    service.start()
    while "ready" not in service.lines:
        assert service.process.poll() is None
try:
    stack.__exit__(None, None, None)
except StackError as error:
    print(error)
"""
        return self.run_script("python3", "-B", "-c", code).stdout

    def test_a_worker_that_dies_at_its_exit_is_told(self):
        serve = "trap '{}' TERM; echo ready >&2; while :; do sleep 0.05; done"
        self.assertEqual(self.stack(serve.format("exit 0")), "")
        said = self.stack(serve.format('[ $1 = decode ] || exit 0; trap - TERM; kill -SEGV $$'))
        self.assertTrue(said.startswith("decode ended with -11"), said)


class Binaries(Case):
    CARGO = """
[ "$1" != bench ] || [ -z "$FAILS" ] || exit 101
for name in kernels driver cuda; do
    [ "$1" = test ] && echo '{"target": {"kind": ["test"], "name": "'$name'"}, "executable": "/bin/true"}'
done
[ "$1" = bench ] && [ -z "$FORGETS" ] && echo '{"target": {"kind": ["bench"], "name": "kernels"}, "executable": "/bin/true"}'
exit 0"""

    def build(self, **environment):
        self.program("cargo", self.CARGO)
        into = self.folder / "into"
        into.mkdir(exist_ok=True)
        (into / "bench").write_text("of an earlier build")
        done = self.run_script(ROOT / "kernels/gpu_check.sh", "build", into, **{"FAILS": "", "FORGETS": ""} | environment)
        return done.returncode, sorted(file.name for file in into.iterdir())

    def test_a_build_gives_all_binaries(self):
        self.assertEqual(self.build(), (0, ["bench", "driver", "engine", "kernels"]))

    def test_a_build_that_fails_says_so_and_leaves_nothing_old(self):
        for how in ("FAILS", "FORGETS"):
            code, names = self.build(**{how: "1"})
            self.assertNotEqual(code, 0, how)
            self.assertNotIn("bench", names, how)


class WholeNode(Case):
    def test_a_measurement_that_fails_leaves_no_stack_behind(self):
        ready = {"http": "127.0.0.1:1", "workers": {"prefill": "", "decode": ""}, "admin": {}, "pids": {}}
        (self.folder / "ready.json").write_text(json.dumps(ready))
        self.program("damask", f"""
case "$*" in
*bench*) exit 3 ;;
*) while [ $# -gt 0 ]; do [ "$1" != --ready-file ] || file=$2; shift; done
    trap 'echo ended >{self.folder}/ended; exit 0' TERM
    cp {self.folder}/ready.json "$file.part"; mv "$file.part" "$file"
    for _ in $(seq 400); do sleep 0.05; done ;;
esac""")
        done = self.run_script(ROOT / "deploy/whole-node.sh", "--binary", self.bin / "damask", "--cpu", "--out", self.folder / "out")
        self.assertEqual(done.returncode, 3, done)
        self.assertIn("ready in", done.stdout)
        self.assertTrue((self.folder / "ended").exists(), "the stack goes on")


if __name__ == "__main__":
    unittest.main()
