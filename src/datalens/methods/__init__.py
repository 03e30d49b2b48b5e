"""One file per paper, each reading top to bottom as its algorithm."""
