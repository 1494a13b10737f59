"""How cells are executed: pools of worker processes, and their jobs.

`pool` starts and watches the workers, `worker` is what runs in each of them, `failures`
says what a broken job means, `jobs` holds the functions that workers run. `processes` and
`lockstep` are the two runners; both offer `run_cell`. The controller's side of this package
imports no torch.
"""
