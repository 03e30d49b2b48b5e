"""A run: its folder, its ranks, its place in a budget, and what is shown of it."""
