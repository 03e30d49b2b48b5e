"""What a run will do, decided by public facts alone."""
