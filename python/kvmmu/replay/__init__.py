"""Real traffic through a KV memory manager, in simulated time, with every byte checked.

What lives here: everything behind ``kvmmu replay``, one room a file.

    traces      files of requests (Mooncake JSONL, Azure CSV)      -> Trace
    sample      traces made from a seed                            -> Trace
    tokens      the token ids of a request
    contents    the 8 bytes that stand for the KV of a position
    options     what a run is asked for, with the allowed ranges
    machine     an MMU with storage, mover and registered tables, every call timed
    running     the requests that hold a row, as arrays
    policy      who is admitted, who computes, who is thrown out
    loop        the serving loop
    alone       each request by itself, prompt only
    verify      reads back through the exported tables
    sabotage    breaks the manager on purpose (never in the normal path)
    report      figures of a run: JSON and table

What never lives here: torch, typer, rich (only ``report.table`` imports rich, when it is called).
NumPy is enough to run a replay from Python.
"""
