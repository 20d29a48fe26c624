"""Allocators for the tests of the fuzzing kit: two correct ones, and small patches that break them."""
