"""What one device computes: run, watched, stored, cached."""
