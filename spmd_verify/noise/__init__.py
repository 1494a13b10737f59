"""The noise of a case: its runs, and the floors that follow from them."""
