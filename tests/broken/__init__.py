"""Allocators for the tests of the fuzzing kit: correct ones, and patches that break them."""
