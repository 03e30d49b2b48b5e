"""Records and their schema: named sets and the user's own."""
