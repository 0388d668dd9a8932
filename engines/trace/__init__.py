"""`clover trace`: how one reply came to be, position by position and step by step, as a page or as JSON."""
