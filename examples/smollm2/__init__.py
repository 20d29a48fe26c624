"""What ``serve_smollm2.py`` is made of: a model, a serving loop over kvmmu, and its reference."""
