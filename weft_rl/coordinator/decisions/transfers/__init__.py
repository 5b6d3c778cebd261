"""A transfer's way: begin, its turn, its group, staging, the commit point; and its ends."""
