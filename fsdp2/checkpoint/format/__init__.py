"""What is in the files: headers, manifests, tensors as bytes, checksums."""
