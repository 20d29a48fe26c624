"""``kvmmu advise``: sizes a pool for a model, a GPU and a load.

What lives here: its options and tables. What never lives here: the arithmetic (see
:mod:`kvmmu.advise`).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from ..advise import fitting, gpus, paying, shapes, sizing
from ..advise.fitting import Compared, Seen
from ..advise.sizing import BlockSize, Load, Pool, Row
from ..errors import InvalidConfig
from ..replay import traces
from ..replay.options import in_range
from .around import (
    Files,
    as_json,
    complain,
    exit_codes,
    refuse_typed,
    show,
    stop_on_ctrl_c,
)

__all__ = ["COMMAND"]


def advise(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A built-in model, or a Hugging Face config.json.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A built-in GPU; or --memory.", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of each GPU.", show_default=False),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Of each GPU, GB/s, where it is not built in.", show_default=False),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Of the KV, where it is not the model's.", show_default=False),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of all weights together.", show_default=False),
    ] = None,
    usable: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    mean_tokens: Annotated[
        float | None,
        typer.Option(help="Of a sequence at its end, on average.", show_default=False),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest sequence (the model's).", show_default=False),
    ] = None,
    peak: Annotated[
        int | None,
        typer.Option(help="Most requests that are to run at once.", show_default=False),
    ] = None,
    step_ms: Annotated[float, typer.Option(help="What a step of decoding may take.")] = 30,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Lengths and load from a trace; page sizes are fitted to it and replayed.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Only the first requests of it.")] = 2_000,
    speed: Annotated[float, typer.Option(help="How much faster than traced.")] = 1,
    live: Annotated[
        float | None,
        typer.Option(help="Mean share of the pool that sequences hold.", show_default=False),
    ] = None,
    shifts: Annotated[
        bool, typer.Option("--shifts", help="The share of long requests changes in minutes.")
    ] = False,
    prefixes: Annotated[bool, typer.Option("--prefixes", help="Prompts share prefixes.")] = False,
    returns_memory: Annotated[
        bool, typer.Option("--returns-memory", help="Memory is given back while serving.")
    ] = False,
    transfers: Annotated[
        bool, typer.Option("--transfers", help="KV is sent by runs, or swapped.")
    ] = False,
    views: Annotated[
        bool, typer.Option("--views", help="Attention reads runs in place, without a paged kernel.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Complete regions must be huge pages, or wait.")
    ] = False,
    write_config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the advice as settings.", show_default=False),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the figures.", show_default=False),
    ] = None,
) -> None:
    """Size a pool for a model, a GPU and a load; every number says where it comes from."""
    with exit_codes():
        if model is None:
            listed = ", ".join(shapes.SHAPES)
            raise InvalidConfig(f"--model: none given, allowed: a config.json, or {listed}")
        if trace is None:
            refuse_typed(context, "without --trace", "with it", "limit", "speed")
        for name, value, low, high in (
            ("tensor_parallel", tensor_parallel, 1, 4096),
            ("block_size", block_size, 1, 4096),
            ("usable", usable, 0.01, 1),
            ("mean_tokens", mean_tokens, 1, 2**31),
            ("longest", longest, 1, 2**31),
            ("peak", peak, 1, 10**6),
            ("step_ms", step_ms, 0.01, 60_000),
            ("limit", limit, 1, 10**9),
            ("speed", speed, 1e-6, 1e6),
            ("live", live, 0, 1),
            ("bandwidth", bandwidth, 0.1, 10**6),
        ):
            if value is not None:
                in_range(name, value, low, high)
        files = Files(json_file=json_file, write_config=write_config)
        shape = _shape(model, kv_dtype)
        pool = sizing.pool_of(
            shape,
            _gpu(gpu, memory, bandwidth),
            ranks=tensor_parallel,
            block_size=block_size,
            usable=usable,
            weights=None if weights is None else _size("weights", weights),
        )
        load = Load(
            longest=longest or shape.longest or 32_768,
            mean_tokens=mean_tokens,
            peak=peak,
            step_s=step_ms / 1000,
        )
        situation = paying.Situation(
            live=live,
            shifts=shifts,
            prefixes=prefixes,
            returns_memory=returns_memory,
            transfers=transfers,
            views=views,
            strict=strict,
        )
        seen: Seen | None = None
        compared: Compared | None = None
        if trace is not None:
            read = traces.read(trace, limit=limit)
            read = replace(read, arrival_s=read.arrival_s / speed)
            seen = fitting.looked_at(read, block_size)
            with stop_on_ctrl_c() as stopped:
                compared = fitting.compare(
                    read, pool.num_blocks, block_size, watch=lambda totals: stopped()
                )
            load, situation = _with_trace(load, situation, seen, compared, pool, read.name)
        _tell(pool, load, situation, seen, compared, files)


def _shape(model: str, kv_dtype: str | None) -> shapes.Shape:
    shape = shapes.find(model)
    if kv_dtype is None:
        return shape
    if kv_dtype not in shapes.DTYPE_BYTES:
        allowed = ", ".join(shapes.DTYPE_BYTES)
        raise InvalidConfig(f"--kv-dtype: {kv_dtype} given, allowed: {allowed}")
    return replace(shape, dtype=kv_dtype)


def _gpu(name: str | None, memory: str | None, bandwidth: float | None) -> gpus.GPU:
    if name is None and memory is None:
        raise InvalidConfig(
            f"--gpu, --memory: none given, allowed: {', '.join(gpus.GPUS)}, or SIZE"
        )
    found = gpus.GPU("GPU", 0, None, "") if name is None else gpus.find(name)
    if memory is not None:
        found = replace(found, memory=_size("memory", memory), source="--memory")
    if bandwidth is not None:
        found = replace(found, bandwidth=bandwidth * 1e9, source=f"{found.source}, --bandwidth")
    return found


def _size(option: str, text: str) -> int:
    from ..config.units import parse_bytes

    try:
        size = parse_bytes(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as error:
        raise InvalidConfig(f"--{option}: {text} given, {error}") from None
    if size < 1:
        raise InvalidConfig(f"--{option}: {text} given, allowed: above 0")
    return size


def _with_trace(
    load: Load,
    situation: paying.Situation,
    seen: Seen,
    compared: Compared,
    pool: Pool,
    name: str,
) -> tuple[Load, paying.Situation]:
    """What was typed wins over what the trace says."""
    figures = compared.default
    if load.mean_tokens is None:
        load = replace(load, mean_tokens=seen.mean_tokens, mean_from=name)
    if load.peak is None and figures["peak_running"]:
        load = replace(load, peak=figures["peak_running"], peak_from=f"replay of {name}")
    live = figures["live_mean"] / pool.num_blocks if situation.live is None else situation.live
    return load, replace(
        situation,
        live=live,
        huge_share=seen.huge_share,
        shifts=situation.shifts or seen.shifts,
        prefixes=situation.prefixes or seen.prefixes,
    )


def _tell(
    pool: Pool,
    load: Load,
    situation: paying.Situation,
    seen: Seen | None,
    compared: Compared | None,
    files: Files,
) -> None:
    lengths = None if seen is None else seen.lengths.tolist()
    prefixes = True if seen is None else situation.prefixes
    sizes = sizing.block_sizes(pool, load, lengths, prefixes=prefixes)
    chosen = sizing.best(sizes)
    verdict, rules = paying.judge(situation)
    rows = [*sizing.rows(pool, load), *_of_the_trace(seen, compared, situation)]
    figures: dict[str, Any] = {
        "model": asdict(pool.shape),
        "gpu": asdict(pool.gpu),
        "num_blocks": pool.num_blocks,
        "block_bytes": pool.block_bytes,
        "block_size": chosen.size,
        "rows": [asdict(row) for row in rows],
        "block_sizes": [{**asdict(size), "cost": size.cost} for size in sizes],
        "situation": asdict(situation),
        "compaction": {
            "verdict": verdict,
            "rules": [
                {name: getattr(rule, name) for name in ("name", "verdict", "says", "source")}
                for rule in rules
            ],
        },
        "pages": None
        if compared is None
        else {
            **asdict(compared.policy),
            "better": compared.better,
            "why": compared.why,
            "entries_a_block": {
                "default": fitting.entries_a_block(compared.default),
                "fitted": fitting.entries_a_block(compared.fitted),
            },
        },
    }
    files.write("json_file", lambda: as_json(figures))
    files.write("write_config", lambda: _settings(pool, load, compared, verdict))
    show(_table(f"{pool.shape.name} on {pool.ranks} x {pool.gpu.name}", rows))
    show(_sizes_table(sizes, chosen, load, lengths is not None))
    show(_rules_table(verdict, rules))
    files.tell()
    if compared is not None and compared.default["interrupted"]:
        complain("the replay was stopped: what it says is of its beginning")


def _of_the_trace(
    seen: Seen | None, compared: Compared | None, situation: paying.Situation
) -> list[Row]:
    if seen is None or compared is None:
        return []
    policy, figures = compared.policy, compared.default
    orders = ", ".join(str(order) for order in policy.page_orders)
    advised = "this" if compared.better else "keep the default (0, 2, 9)"
    return [
        Row("mean sequence", f"{seen.mean_tokens:,.0f} tokens", "the trace"),
        Row("in complete regions", f"{seen.huge_share:.1%} of blocks", "the trace"),
        Row(
            "live",
            f"{situation.live or 0:.1%} of the pool",
            "replay",
            f"{figures['running_mean']:.1f} requests on average",
        ),
        Row(
            "fitted page orders",
            f"{orders} (medium from {policy.medium_from} tokens)",
            "fewest entries for the lengths of the trace",
            f"{compared.why}: {advised}",
        ),
    ]


def _settings(pool: Pool, load: Load, compared: Compared | None, verdict: paying.Verdict) -> str:
    """A file of settings, as text."""
    from ..config import Config

    shape = pool.shape
    pages: dict[str, Any] = {}
    if compared is not None and compared.better:
        policy = compared.policy
        pages = {**asdict(policy), "page_orders": list(policy.page_orders)}
    sequences = 1024
    if load.mean_tokens is not None:
        sequences = max(1, min(int(pool.tokens / load.mean_tokens), 262_144))
    config = Config.from_dict(
        {
            "model": {
                "num_layers": shape.layers,
                "num_kv_heads": shape.heads_of_rank(pool.ranks),
                "head_dim": shape.head_dim,
                "v_head_dim": shape.v_head_dim,
                "dtype": shape.dtype,
            },
            "pool": {
                "num_blocks": pool.num_blocks,
                "block_size": pool.block_size,
                "max_sequences": sequences,
            },
            "pages": pages,
            "compaction": {"auto_compact": verdict == "pays"},
            "kvcache": {"device": "cuda"},  # the pool is as large as the GPU's memory
        }
    )
    return config.to_yaml()


def _table(title: str, rows: list[Row]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None)
    table.add_column("", style="bold")
    for heading, style in (("value", ""), ("from", "dim"), ("", "")):
        table.add_column(heading, style=style, overflow="fold")
    for row in rows:
        table.add_row(*(escape(text) for text in (row.what, row.value, row.source, row.note)))
    return table


def _sizes_table(sizes: list[BlockSize], chosen: BlockSize, load: Load, measured: bool) -> Any:
    from rich.table import Table

    table = Table(
        title=f"block size: {chosen.size}, the largest within a hundredth of the cheapest "
        "(a rule says 128)",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    for heading in ("tokens", "waste", "tables", "computed again", "entries a row", "piece"):
        table.add_column(heading, justify="right")
    for size in sizes:
        table.add_row(
            str(size.size),
            f"{size.waste:.3%}",
            f"{size.table:.4%}",
            f"{size.again:.3%}",
            f"{size.entries:,}",
            f"{size.piece / 1024:,.1f} KiB",
            style="bold" if size is chosen else "",
        )
    source = "last blocks of the trace's sequences" if measured else "half a block a sequence"
    if load.mean_tokens is None and not measured:
        source += " of half the longest, for want of --mean-tokens or --trace"
    table.caption = (
        f"from: waste: {source}; tables: 4 bytes a block on the device and the page table's; "
        "computed again: half a block of a shared prefix, of a mean sequence; piece: of one "
        "layer (NHD)"
    )
    table.caption_justify = "left"
    return table


def _rules_table(verdict: paying.Verdict, rules: tuple[paying.Rule, ...]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    said = {
        "pays": "compaction pays for this load",
        "little": "compaction does little for this load",
        "nothing": "compaction does nothing for this load",
        "unknown": "whether compaction pays: say more of the load "
        "(--trace; --live, --shifts, --prefixes, --returns-memory, --transfers, --views)",
    }[verdict]
    table = Table(title=said, title_justify="left", title_style="bold", box=None)
    table.add_column("", style="bold")
    table.add_column("compaction")
    table.add_column("", overflow="fold")
    table.add_column("from", style="dim", overflow="fold")
    for rule in rules:
        table.add_row(rule.name, rule.verdict, escape(rule.says), rule.source)
    return table


COMMAND = advise
