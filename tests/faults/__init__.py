"""Faults by enumeration: every write that operator and agent make is cut, lost or refused once, and the end must be the same."""
