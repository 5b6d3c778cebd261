"""Role of a worker in side groups: it receives what is pushed, and sends clones."""
