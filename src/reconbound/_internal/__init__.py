"""Shared helpers: checks, errors, files, random numbers, progress, number formats."""
