"""Fisher information of every record, summed over training: ledgers and their confidence."""
