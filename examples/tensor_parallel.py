"""Tensor-parallel inference by transformers: the layers of a small Llama are shared among the ranks.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tokens 64 --against gloo

Only the name of the backend is Unisono's: ``tp_plan="auto"`` of transformers does the rest. Each layer adds up its
results over the ranks twice, by `all_reduce`. The weights are random and made here, so nothing is downloaded.

The program compares the logits of the shared model with those of the whole model. Then it measures how many tokens per
second the shared model generates, in turn with the same model over another backend. All ranks must be on one host,
because they read the weights from a folder that rank 0 writes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import unisono.torch  # noqa: F401  (registers the backend; torch finds an installed Unisono without it)

VOCABULARY, HEADS = 1024, 8
PROMPT, WARM_UP_TOKENS = 32, 4
# By dtype, how much logits may differ, relative to the largest one: sums over ranks are rounded in another order.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="of the hidden states, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--tokens", type=int, default=32, help="to generate in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", help="another backend to measure, such as gloo")
    return parser.parse_args()


def save(folder: str, options: argparse.Namespace) -> None:
    """Save a model with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, options.dtype)).save_pretrained(folder)


def load(folder: str, options: argparse.Namespace, **sharing: Any) -> Any:
    """Return the saved model: the whole one, or the part of this rank if a `distributed_config` says so."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype), **sharing).eval()


def models_of(backends: list[str], options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the whole model, and by backend the model that the ranks share."""
    with tempfile.TemporaryDirectory() as folder:
        shared_folder = [folder]
        dist.broadcast_object_list(shared_folder)
        if dist.get_rank() == 0:
            save(folder, options)
        dist.barrier()
        whole, shared, world = load(shared_folder[0], options), {}, dist.group.WORLD
        for backend in backends:
            dist.group.WORLD = dist.new_group(backend=backend)  # transformers takes the default group
            shared[backend] = load(shared_folder[0], options, distributed_config=DistributedConfig(tp_plan="auto"))
        dist.group.WORLD = world
        dist.barrier()  # before rank 0 removes its folder
    return whole, shared


def largest_difference(model: Any, whole: Any, prompt: Any) -> float:
    """Return how much the logits of two models differ at most, relative to the largest logit."""
    with torch.no_grad():
        expected = whole(prompt).logits.float()
        return float((model(prompt).logits.float() - expected).abs().max() / expected.abs().max())


def tokens_per_s(model: Any, prompt: Any, tokens: int) -> float:
    """Generate tokens after a prompt; return how many per second."""
    dist.barrier()
    began = time.perf_counter()
    model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tokens / (time.perf_counter() - began)


def main() -> None:
    """Compare the shared model with the whole one, and measure it; exit with 1 if the logits differ."""
    options = arguments()
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", size))))
    backends = list(dict.fromkeys(filter(None, ("unisono", options.against))))
    whole, models = models_of(backends, options)
    prompt = torch.arange(PROMPT)[None] * 31 % VOCABULARY
    difference = largest_difference(models["unisono"], whole, prompt)
    is_equal = difference < TOLERANCES[options.dtype]
    if rank == 0:
        print(f"{size} ranks: logits {'equal' if is_equal else 'differ from'} those of one process ({difference:.1e})")
    rates: dict[str, list[float]] = {backend: [] for backend in backends}
    for model in models.values():
        tokens_per_s(model, prompt, WARM_UP_TOKENS)
    for _ in range(options.rounds):
        for backend, model in models.items():
            rates[backend].append(tokens_per_s(model, prompt, options.tokens))
    for backend in backends if rank == 0 else ():
        print(f"{backend}: {median(rates[backend]):.1f} tokens/s")
    dist.destroy_process_group()
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
