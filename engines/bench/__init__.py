"""`clover bench`: speed of one engine in all its modes, and of servers against each other by what they get right."""
