"""What a version consists of, and how it is cut: manifests, buckets, runs, send plans."""
