"""A worker's part in side groups: it receives what is pushed, and sends clones."""
