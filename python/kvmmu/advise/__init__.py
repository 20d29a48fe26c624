"""Sizing a pool for a model, a GPU and a load: ``kvmmu advise``.

What lives here: what is known of models and GPUs (:mod:`.shapes`, :mod:`.gpus`), the arithmetic
(:mod:`.sizing`), when compaction pays (:mod:`.paying`), and page sizes fitted to a trace
(:mod:`.fitting`). What never lives here: a number without its source.
"""
