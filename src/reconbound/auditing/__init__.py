"""Audits: options, models, the run, snapshots, leakage, the released model."""
