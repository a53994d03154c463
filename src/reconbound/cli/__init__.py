"""The command line, one command a file; what needs torch is imported when a command runs."""
