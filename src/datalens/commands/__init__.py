"""One file per verb: what may be asked (a dataclass, which is the command line), and what it does when called."""
