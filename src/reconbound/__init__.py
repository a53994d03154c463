"""reconbound: how well is each training record protected against reconstruction?"""

__version__ = "0.1.0.dev0"
