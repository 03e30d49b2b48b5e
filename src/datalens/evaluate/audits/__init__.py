"""Attempts to prove a claimed guarantee wrong."""
