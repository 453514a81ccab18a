#!/usr/bin/env python3
"""Runs a Hugging Face model with forward hooks and writes a Karat dump of every prompt.

    pip install -r golden/export/requirements.txt
    python golden/export/export_golden.py MODEL --prompt-ids FILE --out DIR [--tokens 4] [--dtype float32]
    karat verify MODEL --golden DIR/0
    karat verify MODEL --subject dump:DIR/0

FILE holds one prompt a line, token ids separated by spaces; DIR/<i>/ gets `manifest.json` and
`taps.safetensors` of prompt i: the prefill, then greedy steps with the cache. The model runs on the CPU with
eager attention. Values go to disk as they come: beside the model no more than one tensor is held.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import shutil
import struct
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

# What a module of a layer puts out: the site's name and its axes.
HIDDEN = ["tokens", "hidden"]
OUTPUTS = {
    "input_layernorm": ("attn_norm", HIDDEN),
    "operator_norm": ("attn_norm", HIDDEN),
    "self_attn.q_proj": ("q_proj", ["tokens", "q"]),
    "self_attn.k_proj": ("k_proj", ["tokens", "k"]),
    "self_attn.v_proj": ("v_proj", ["tokens", "v"]),
    "self_attn.qkv_proj": ("qkv_proj", ["tokens", "q+k+v"]),
    "self_attn.q_norm": ("q_norm", ["tokens", "heads", "head_dim"]),
    "self_attn.k_norm": ("k_norm", ["tokens", "kv_heads", "head_dim"]),
    "self_attn.o_proj": ("attn_out", HIDDEN),
    "self_attn.out_proj": ("attn_out", HIDDEN),
    "linear_attn.out_proj": ("attn_out", HIDDEN),
    "conv.out_proj": ("attn_out", HIDDEN),
    "post_feedforward_layernorm": ("post_mlp_norm", HIDDEN),
    "ffn_norm": ("mlp_norm", HIDDEN),
    "mlp.gate_proj": ("mlp_gate", ["tokens", "intermediate"]),
    "mlp.up_proj": ("mlp_up", ["tokens", "intermediate"]),
    "mlp.gate_up_proj": ("mlp_gate_up", ["tokens", "gate+up"]),
    "mlp.down_proj": ("mlp_out", HIDDEN),
    "feed_forward.w1": ("mlp_gate", ["tokens", "intermediate"]),
    "feed_forward.w3": ("mlp_up", ["tokens", "intermediate"]),
    "feed_forward.w2": ("mlp_out", HIDDEN),
}

# What a module reads, where no module puts it out.
INPUTS = {
    "mlp.down_proj": ("mlp_act", ["tokens", "intermediate"]),
    "feed_forward.w2": ("mlp_act", ["tokens", "intermediate"]),
}


def first_tensor(value):
    """A module's value: itself, or the first of several."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value


class Writer:
    """A dump in the making, in a directory beside its target; nothing is left where it does not finish."""

    def __init__(self, target, heads_first):
        self.target, self.heads_first, self.tokens = pathlib.Path(target), heads_first, 0
        if self.target.exists() and any(self.target.iterdir()):
            sys.exit(f"{self.target} exists and is not an empty directory; nothing was written")
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix=".karat-dump-", dir=self.target.parent))
        os.chmod(self.dir, 0o755)
        self.data = open(self.dir / "data", "w+b")
        self.lines, self.header, self.end = [], {}, 0

    def tap(self, name, axes, values):
        """Adds a tap; one that a module of another name gave before is kept as it was."""
        if name in self.header:
            return
        values = values.detach().to(torch.float32).contiguous().cpu().numpy()
        values = values.reshape(values.shape[1:])  # the batch of one
        # Some families norm their heads behind the exchange of heads and tokens.
        if values.ndim == 3 and (values.shape[0] != self.tokens or self.heads_first):
            values = values.transpose(1, 0, 2)
        if axes and len(axes) != values.ndim:
            values = values.reshape(values.shape[0], *([-1] if len(axes) == 2 else values.shape[1:]))
        data = values.astype("<f4").tobytes()
        self.data.write(data)
        self.header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [self.end, self.end + len(data)],
        }
        self.end += len(data)
        self.lines.append(line(name, axes if len(axes) == values.ndim else [], values, data))

    def finish(self, fields):
        """Completes the dump and moves it to its place."""
        header = json.dumps(self.header, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self.data.seek(0)
        with open(self.dir / "taps.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            shutil.copyfileobj(self.data, file, 1 << 24)
        self.data.close()
        (self.dir / "data").unlink()
        rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        taps = ",\n".join(json.dumps(one) for one in self.lines)
        text = "{\n" + ",\n".join(rows) + f',\n"taps": [\n{taps}\n]\n' + "}\n"
        (self.dir / "manifest.json").write_text(text)
        if self.target.is_dir():
            self.target.rmdir()
        self.dir.rename(self.target)

    def drop(self):
        shutil.rmtree(self.dir, ignore_errors=True)


def six_digits(x):
    return float(f"{x:.5e}")


def line(name, axes, values, data):
    """A tap's line in the manifest."""
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)]
    squares = float(np.dot(finite.astype(np.float64), finite.astype(np.float64)))
    entry = {
        "site": name,
        "axes": axes,
        "shape": list(values.shape),
        "dtype": "f32",
        "rms": six_digits(math.sqrt(squares / finite.size)) if finite.size else 0.0,
        "min": six_digits(finite.min()) if finite.size else 0.0,
        "max": six_digits(finite.max()) if finite.size else 0.0,
    }
    if finite.size < flat.size:
        entry["non_finite"] = int(flat.size - finite.size)
    entry["first"] = [six_digits(v) if np.isfinite(v) else None for v in flat[:4]]
    if name.endswith(".logits"):
        entry["argmax"] = [int(row.argmax()) for row in values]
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    return entry


class Hooks:
    """Hooks on every module whose value is a site."""

    def __init__(self, model):
        self.writer, self.name = None, ""
        base = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        self.output(base.embed_tokens, "embed", HIDDEN)
        for i, layer in enumerate(base.layers):
            self.layer(layer, f"layers.{i}")
        norm = getattr(base, "norm", None) or getattr(base, "embedding_norm", None)
        if norm is not None:
            self.output(norm, "final_norm", HIDDEN)

    def layer(self, layer, at):
        modules = dict(layer.named_modules())
        for name, (site, axes) in OUTPUTS.items():
            if name in modules:
                self.output(modules[name], f"{at}.{site}", axes)
        for name, (site, axes) in INPUTS.items():
            if name in modules:
                self.input(modules[name], f"{at}.{site}", axes)
        # One name, two places: before the feed-forward, or behind attention where the former has its own norm.
        if "post_attention_layernorm" in modules:
            own = "pre_feedforward_layernorm" in modules or "post_feedforward_layernorm" in modules
            site = "post_attn_norm" if own else "mlp_norm"
            self.output(modules["post_attention_layernorm"], f"{at}.{site}", HIDDEN)
            if not own:
                self.input(modules["post_attention_layernorm"], f"{at}.resid_mid", HIDDEN)
        if "pre_feedforward_layernorm" in modules:
            self.output(modules["pre_feedforward_layernorm"], f"{at}.mlp_norm", HIDDEN)
            self.input(modules["pre_feedforward_layernorm"], f"{at}.resid_mid", HIDDEN)
        if "mlp.experts" in modules:
            shared = any(name in modules for name in ("mlp.shared_expert", "mlp.shared_experts"))
            self.output(modules["mlp"], f"{at}.{'moe_out' if shared else 'experts_out'}", HIDDEN)
        self.output(layer, f"{at}.out", HIDDEN)

    def output(self, module, site, axes):
        module.register_forward_hook(lambda _m, _a, out: self.show(site, axes, out))

    def input(self, module, site, axes):
        def hook(_module, args, kwargs):
            self.show(site, axes, args if args else next(iter(kwargs.values())))

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def show(self, site, axes, value):
        if self.writer is not None:
            self.writer.tap(f"{self.name}.{site}", axes, first_tensor(value))


def model_hash(model):
    """The hash that names a package: sha256 over `name sha256` of its config and weights, sorted by name."""
    directory = pathlib.Path(model)
    if not directory.is_dir():
        return None
    lines = []
    for file in [directory / "config.json", *directory.glob("*.safetensors")]:
        if file.name == "golden.safetensors":
            continue
        digest = hashlib.sha256()
        with open(file, "rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
        lines.append(f"{file.name} {digest.hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def export(model, hooks, prompt, steps, target, fields):
    """Writes the dump of one prompt."""
    heads_first = model.config.get_text_config().model_type in ("gemma3", "gemma3_text")
    writer = Writer(target, heads_first)
    try:
        hooks.writer, greedy, passes = writer, [], []
        ids, cache, position = prompt, None, 0
        for n in range(steps + 1):
            writer.tokens = len(ids)
            hooks.name = "prefill" if n == 0 else f"step{n}"
            with torch.no_grad():
                out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            writer.tap(f"{hooks.name}.logits", ["tokens", "vocab"], out.logits)
            phase = "prefill" if n == 0 else "decode"
            passes.append({"pass": hooks.name, "phase": phase, "positions": [position, position + len(ids)]})
            position += len(ids)
            cache = out.past_key_values
            greedy.append(int(out.logits[0, -1].argmax()))
            ids = [greedy[-1]]
        hooks.writer = None
        writer.finish({**fields, "prompt": prompt, "greedy": greedy, "passes": passes})
    except BaseException:
        writer.drop()
        raise


def load(name, **options):
    """The model; its experts one by one where this version of the framework can say so."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, experts_implementation="eager", **options)
    except (TypeError, ValueError):
        return AutoModelForCausalLM.from_pretrained(name, **options)


def read_prompts(file):
    prompts = []
    for number, text in enumerate(pathlib.Path(file).read_text().splitlines(), 1):
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            sys.exit(f"{file}, line {number}: {error}")
        if ids:
            prompts.append(ids)
    return prompts or sys.exit(f"{file} holds no prompt; expected token ids, one prompt a line")


def main():
    parser = argparse.ArgumentParser(description="write a Karat dump of a Hugging Face model")
    parser.add_argument("model", help="a directory or a name that transformers loads")
    parser.add_argument("--prompt-ids", required=True, metavar="FILE")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--tokens", type=int, default=4, metavar="N", help="greedy steps behind the prompt")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    prompts = read_prompts(args.prompt_ids)

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = load(args.model, dtype=dtype, attn_implementation="eager").eval()
    fields = {
        "format": "karat-dump/1",
        "producer": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "origin": "independent-oracle",
        "rounding": f"{args.dtype} throughout",
    }
    if (found := model_hash(args.model)) is not None:
        fields["model_hash"] = found
    hooks = Hooks(model)
    for n, prompt in enumerate(prompts):
        target = pathlib.Path(args.out) / str(n)
        export(model, hooks, prompt, args.tokens, target, fields)
        print(target)


if __name__ == "__main__":
    main()
