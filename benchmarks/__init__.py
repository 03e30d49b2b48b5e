"""Speed, each claim a command that prints JSON. A package, because Opacus installs one of the same name."""
