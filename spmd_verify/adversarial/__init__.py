"""The adversarial changes of a case: inputs that symmetric ones hide faults from."""
