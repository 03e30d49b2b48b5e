"""Theorem 6 of DataLens: the bound, its assumption on top-k, problems to try it on, and what it says about k."""
