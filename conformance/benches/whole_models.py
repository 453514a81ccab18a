"""S5 to S8: whole models in turns with llama.cpp and transformers, medians of the ratios of the rounds.

    python whole_models.py --karat KARAT --q4_0 m.gguf --llama-bench LLAMA_BENCH
    python whole_models.py --karat KARAT --f32 f32.gguf --bf16 bf16.gguf --q4_0 m.gguf --transformers

The files are written by `cargo run --release -p karat-fixtures --example synthetic`, see PEERS.md. Every program runs
on one processor, the same for all (Linux, `taskset`); in each round all of them run once, in an order that is turned
from round to round.
"""

import argparse
import json
import statistics
import subprocess
import time

PROCESSOR = 0


def output(*command):
    return subprocess.run(
        ["taskset", "-c", str(PROCESSOR), *map(str, command)], check=True, capture_output=True, text=True
    ).stdout


def karat(program, file, subject, prompt, tokens):
    """Tokens a second of a prompt at once and of steps behind it."""
    found = output(program, "bench", file, "--subject", subject, "--prompt", prompt, "--tokens", tokens,
                   "--pairs", 1, "--format", "json")
    [speed] = json.loads(found)["runs"][0]["speeds"]
    return {f"prefill {prompt}": speed["prefill_tok_s"], "decode": speed["decode_tok_s"]}


def llama(program, file, prompts, tokens):
    sizes = ",".join(map(str, prompts))
    lines = output(program, "-m", file, "-t", 1, "-p", sizes, "-n", tokens, "-r", 1, "-o", "jsonl").splitlines()
    runs = [json.loads(line) for line in lines if line.startswith("{")]
    return {f"prefill {r['n_prompt']}" if r["n_prompt"] else "decode": r["avg_ts"] for r in runs}


class Transformers:
    """The shape of the synthetic file with random weights in f32."""

    def __init__(self):
        import os

        os.sched_setaffinity(0, {PROCESSOR})
        import torch
        import transformers

        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.torch = torch
        config = transformers.Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
            tie_word_embeddings=True,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self.run(128, 2)

    def run(self, prompt, tokens):
        torch = self.torch
        ids = torch.randint(0, 151936, (1, prompt))
        with torch.inference_mode():
            began = time.perf_counter()
            # One row of logits, as the others compute it.
            found = self.model(ids, use_cache=True, logits_to_keep=1)
            prefill = time.perf_counter() - began
            steps = []
            for _ in range(tokens):
                began = time.perf_counter()
                following = found.logits[:, -1:].argmax(-1)
                found = self.model(following, past_key_values=found.past_key_values, use_cache=True)
                steps.append(time.perf_counter() - began)
        return {f"prefill {prompt}": prompt / prefill, "decode": 1 / statistics.median(steps)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--karat", required=True)
    parser.add_argument("--q4_0", required=True)
    parser.add_argument("--llama-bench")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--f32", help="the model in F32, for S8")
    parser.add_argument("--bf16", help="the model in BF16, for S8")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    runs = {}
    ratios = []
    if args.llama_bench:
        runs["llama.cpp"] = lambda: llama(args.llama_bench, args.q4_0, [16, 128, 512], 64)
        for prompt in [16, 128, 512]:
            runs[f"w4a8 {prompt}"] = lambda prompt=prompt: karat(args.karat, args.q4_0, "npu:w4a8", prompt, 64)
            ratios.append((f"S6 prefill {prompt}", f"w4a8 {prompt}", "llama.cpp", f"prefill {prompt}"))
        ratios.insert(0, ("S5 decode", "w4a8 16", "llama.cpp", "decode"))
    if args.transformers:
        peer = Transformers()
        print(peer.versions)
        runs["transformers"] = lambda: peer.run(128, 16)
        runs["npu:f32"] = lambda: karat(args.karat, args.q4_0, "npu:f32", 128, 16)
        ratios += [("S7 decode", "npu:f32", "transformers", "decode"),
                   ("S7 prefill 128", "npu:f32", "transformers", "prefill 128")]
        runs["reference"] = lambda: karat(args.karat, args.q4_0, "reference", 128, 8)
        ratios.append(("S8 prefill 128", "reference", "transformers", "prefill 128"))
    if args.f32:
        runs["reference f32"] = lambda: karat(args.karat, args.f32, "reference", 16, 8)
        files = {"q4_0": args.q4_0, "bf16": args.bf16}
        for name, file in [(name, file) for name, file in files.items() if file]:
            runs[f"reference {name}"] = lambda file=file: karat(args.karat, file, "reference", 16, 8)
            ratios.append((f"S8 decode {name}", f"reference {name}", "reference f32", "decode"))

    names = list(runs)
    rounds = []
    for n in range(args.rounds):
        turn = n % len(names)
        rounds.append({name: runs[name]() for name in names[turn:] + names[:turn]})
        print(f"round {n + 1}", json.dumps(rounds[-1]), flush=True)
    for name in names:
        speeds = {kind: statistics.median(r[name][kind] for r in rounds) for kind in rounds[0][name]}
        print(f"{name:14}", "   ".join(f"{kind} {speed:.2f} tok/s" for kind, speed in speeds.items()))
    for figure, over, under, kind in ratios:
        each = sorted(r[over][kind] / r[under][kind] for r in rounds)
        print(f"{figure:18} {over} over {under}: {statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})")


if __name__ == "__main__":
    main()
