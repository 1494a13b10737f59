"""Cases: found, loaded, built and stepped."""
