"""Targets, bundles and backends: what is built, and what runs it."""
