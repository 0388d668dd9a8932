"""What the command line shows: progress, errors, tables and blocks developing."""
