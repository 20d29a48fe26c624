"""Configuration: files of settings that build an MMU or a KVCache.

What lives here: :class:`Config` (:mod:`.settings`), the reader of YAML and the checks that any file
of settings goes through (:mod:`.files`), and units (:mod:`.units`). What never lives here: what a
setting does. Needs ``kvmmu[config]``.
"""
