"""What transfers are for: each purpose with its data and its rules, in one file."""
