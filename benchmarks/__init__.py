"""What the documentation claims about speed, each a command. (A package, since Opacus installs one of this name.)"""
