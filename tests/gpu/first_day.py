"""First use on a GPU machine: install the wheel, train models by hub name, and generate with their exports.

    python tests/gpu/first_day.py --wheel WHEEL --gguf SmolLM2.gguf --out DIR [--cases ...] [--seconds 540]

The wheel is installed into a fresh environment over the machine's packages; every command is the console
script in an empty folder, with a hub on loopback. Cases: ``doctor``; ``dense``: SmolLM2 by its hub name, FSDP
and SGLang, export, answer; ``serve``: that run served by SGLang, asked with and without its key; ``moe``: a
random Qwen3-MoE by its hub name, Megatron with routing replay, export; ``across``: FSDP from the commit of
``moe``; ``fp8``: that mixture with FP8 rollouts. Prints a table at the end and writes it to
DIR/first_day.txt, with the logs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import site
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.random_model import write_model  # noqa: E402
from tests.gpu.sglang_models import smollm2  # noqa: E402
from tests.hub import Hub  # noqa: E402

WORK = Path("/tmp/first_day")
GPU = ("launch", "--local", "gpu-smollm2.yaml", "wandb.enabled=false", "checkpoint.save_interval=2")
SMALL = ("rollout.batch_size=8", "rollout.n_samples=8", "train.global_batch_size=64")
MOE = (
    *("model.path=Acme/Qwen3-MoE", "rollout.custom_reward=tests.gpu.random_model:even_tokens", *SMALL),
    *("model.chat_format=chatml", "rollout.record_routes=true", "train.routing_replay=true", "train.lr=1e-5"),
)
MEGATRON = ("train.backend=megatron", "run.name=moe", "train.steps=4")
CASES: dict[str, list[tuple[str, ...]]] = {
    "doctor": [("--version",), ("doctor", "gpu-smollm2.yaml"), ("init", "task"), ("files", "torch-2.11.txt")],
    "dense": [
        ("check", "gpu-smollm2.yaml", "model.path=Acme/SmolLM2", "run.name=dense"),
        (*GPU, *SMALL, "model.path=Acme/SmolLM2", "run.name=dense", "train.steps=4"),
        ("export", "runs/dense"),
        ("ANSWER", "runs/dense/export/step_4"),
    ],
    "serve": [("SERVE", "runs/dense")],
    "moe": [(*GPU, *MOE, *MEGATRON), ("export", "runs/moe"), ("ANSWER", "runs/moe/export/step_4")],
    "across": [
        (*GPU, *MOE, "run.name=across", "train.steps=2", "checkpoint.load=runs/moe"),
        ("export", "runs/across"),
    ],
    "fp8": [(*GPU, *MOE, "run.name=fp8", "train.steps=2", "precision=fp8-rollout")],
}
ANSWER = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).cuda()
asked = [{"role": "user", "content": "What is 3 + 4? Answer with the number only."}]
ids = tokenizer.apply_chat_template(asked, return_tensors="pt", return_dict=True, add_generation_prompt=True)
out = model.generate(ids["input_ids"].cuda(), max_new_tokens=12, do_sample=False)
print("answer:", repr(tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True)))
"""
SERVE = """
import json, os, signal, subprocess, sys, time, urllib.error, urllib.request
began = time.monotonic()
url, key = "http://127.0.0.1:8123/v1/chat/completions", "a-key-of-the-first-day-1234567890"
command = [sys.argv[1], "serve", sys.argv[2], "--port", "8123", "--name", "adder"]
environment = os.environ | {"ORHPC_SERVE_KEY": key}
server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
lines = []
while not any("/v1" in line for line in lines):
    line = server.stdout.readline()
    if not line:
        sys.exit("the server ended: " + "".join(lines))
    lines.append(line)
seconds = time.monotonic() - began
asked = [{"role": "user", "content": "What is 3 + 4? Answer with the number only."}]
body = {"model": "adder", "messages": asked, "max_tokens": 12, "temperature": 0}
def ask(headers):
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code
refused, answer = ask({}), ask({"Authorization": "Bearer " + key})
server.send_signal(signal.SIGINT)
code = server.wait(60)
print(f"answer: {answer!r}, without the key {refused}, ready after {seconds:.0f} s, exit {code}")
sys.exit(refused != 401 or not isinstance(answer, str))
"""


def environment(wheel: Path) -> Path:
    """A fresh environment with the wheel over the packages of this Python; returns its ``bin``."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", WORK / "venv"], check=True)
    # This Python may be in a virtual environment, whose packages --system-site-packages does not include.
    packages = next((WORK / "venv").glob("lib/python3*/site-packages"))
    (packages / "carried.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
    subprocess.run([WORK / "venv/bin/python", "-m", "pip", *install], check=True)
    return WORK / "venv/bin"


def serve_models(gguf: Path) -> Path:
    """Folders of the hub: a real small model, and a mixture of experts with random weights in shards."""
    root = WORK / "hub"
    shutil.copytree(smollm2(gguf), root / "Acme" / "SmolLM2", dirs_exist_ok=True)
    write_model(root / "Acme" / "Qwen3-MoE", 4, "small")
    return root


def run(
    programs: Path, args: tuple[str, ...], log: Path, env: dict[str, str], seconds: float
) -> tuple[int, str]:
    """Run one command in the user's folder; returns its exit code and its row of the table."""
    began = time.monotonic()
    command = [str(programs / "orhpc"), *args]
    if args[0] == "ANSWER":
        command = [str(programs / "python"), "-c", ANSWER, args[1]]
    elif args[0] == "SERVE":
        command = [str(programs / "python"), "-c", SERVE, str(programs / "orhpc"), args[1]]
    with log.open("a") as stream:
        stream.write(f"\n$ {' '.join(args)}\n")
        stream.flush()
        start = stream.tell()
        try:
            code = subprocess.run(
                command,
                cwd=WORK / "home",
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    with log.open() as stream:
        stream.seek(start)
        output = [line for line in stream.read().splitlines() if line.strip()]
    took = time.monotonic() - began
    results = [line for line in output if re.match(r"(answer:|BAD|step \d+/|finished|orhpc)", line)] or output
    return (
        code,
        f"exit {code} {took:5.0f} s  orhpc {' '.join(args)[:70]}: {results[-1][:160] if results else ''}",
    )


def checked(run_dir: Path) -> str:
    """Results of the checks at the start, and the difference between engine and trainer."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    wanted = ("engine_check", "rollout_kl", "logprob_diff_mean", "model_check")
    found = {
        key: value
        for event in events
        for key, value in event.items()
        if any(key.startswith(name) for name in wanted) and isinstance(value, (int, float))
    }
    return "  ".join(f"{key} {value:.2g}" for key, value in sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=540)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    (WORK / "home").mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    programs = environment(options.wheel)
    rows: list[str] = []
    bad = False
    with Hub(serve_models(options.gguf)) as hub:
        # The reward function for random weights is in this repository; everything else comes from the wheel.
        shutil.copytree(ROOT / "tests", WORK / "home" / "tests", dirs_exist_ok=True)
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(WORK / "hf"), "HF_HUB_OFFLINE": "0"}
        for case in options.cases:
            for args in CASES[case]:
                left = end - time.monotonic()
                if left < 20:
                    rows.append(f"{case:7} no time left for orhpc {' '.join(args)[:60]}")
                    break
                code, row = run(programs, args, options.out / f"{case}.log", env, left)
                rows.append(f"{case:7} {row}")
                print(rows[-1], flush=True)
                if code and case != "doctor":
                    bad = True
                    break
            if (WORK / "home" / "runs" / case / "events.jsonl").exists():
                rows.append(f"{case:7} {checked(WORK / 'home' / 'runs' / case)}")
    (options.out / "first_day.txt").write_text("\n".join(rows) + "\n")
    for case in options.cases:
        for log in (WORK / "home" / "runs" / case).glob("attempts/*/*.log"):
            (options.out / f"{case}_{log.name}.txt").write_text(log.read_text(errors="replace")[-30000:])
    print("\n".join(rows))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
