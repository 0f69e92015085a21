"""The node agent: captures, restores, releases and reports for the pods of its own node."""
