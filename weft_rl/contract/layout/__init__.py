"""Contents of a version and their layout: manifests, buckets, runs, send plans."""
