"""Custom operations: one folder holds one op's whole life."""
