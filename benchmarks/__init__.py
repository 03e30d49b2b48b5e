"""Benchmarks: each performance claim has a command that prints JSON.

This is a package because Opacus installs a package of the same name.
"""
