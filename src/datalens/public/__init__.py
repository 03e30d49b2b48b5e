"""Functions of public facts, used on both sides of the gate."""
