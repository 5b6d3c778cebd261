"""What differs between versions and builds of vLLM."""
