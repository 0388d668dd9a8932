"""MoECoresetRouting: one shared expert set for all preview rows of a block."""
