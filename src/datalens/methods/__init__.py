"""The methods: one file for each paper, which reads from top to bottom like its algorithm."""
