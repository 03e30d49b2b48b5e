"""Functions of public facts, which both sides of the gate use."""
