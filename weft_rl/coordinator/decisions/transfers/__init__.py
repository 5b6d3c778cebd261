"""Course of a transfer: begin, its turn, its group, staging, the commit point; and its ends."""
