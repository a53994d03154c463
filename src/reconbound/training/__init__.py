"""Private training: settings, sampling, noise, the learner and its checkpoints."""
