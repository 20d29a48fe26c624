"""Long simulated runs of policies over scenarios: does compaction pay, and where not?

What lives here:

- :mod:`.scenario`: what a scenario file may say; those that come with kvmmu are in ``scenarios/``.
- :mod:`.workload`: the requests of a scenario, from a seed.
- :mod:`.policies`: each policy as a configuration of the product.
- :mod:`.run`: one policy over one scenario, through the serving loop of :mod:`kvmmu.replay`.
- :mod:`.together`: several policies in processes of their own.
- :mod:`.concurrency`: how many requests can be sustained, by bisection over the rate.
- :mod:`.figures`: the definition of every figure; :mod:`.report`: tables; :mod:`.columns`: how they
  are cut where the page is too narrow.

What never lives here: a second serving loop, and contents: bytes are verified by
``kvmmu replay --verify`` and by ``--verify`` here. Needs ``kvmmu[cli]``.
"""
