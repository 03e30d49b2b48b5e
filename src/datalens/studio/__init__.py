"""The studio: a page in the browser of this machine, for people who do not live in a shell."""
