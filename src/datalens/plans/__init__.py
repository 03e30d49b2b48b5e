"""Plans of runs, made from public facts alone."""
