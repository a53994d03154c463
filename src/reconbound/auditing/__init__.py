"""Audits: options, models, the run, snapshots, leakage, and the released model."""
