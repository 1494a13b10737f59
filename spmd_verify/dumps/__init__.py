"""Dumps: what ranks of any training hold, on disk, judged without our runner."""
