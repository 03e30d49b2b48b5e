"""The user's own data, in any of its formats."""
