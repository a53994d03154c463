"""Many trainings at once on one device."""
