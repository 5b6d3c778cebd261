"""The HTTP half of a replica: what listens, which models it names, and what uses them."""
