"""Audits: attempts to refute a claimed privacy guarantee."""
