"""Single faults planted into a user's own parallel run, for certificates: docs/design.md 3.9."""
