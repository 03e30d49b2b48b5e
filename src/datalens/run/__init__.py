"""A run: its folder, its ranks, its reservation in a budget, and its progress on the terminal."""
