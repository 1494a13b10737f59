"""Why a cell fails: what is known of it, what else to run, and what that says."""
