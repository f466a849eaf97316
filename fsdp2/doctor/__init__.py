"""``fsdp2 doctor``: finds problems of a job's machines before the job runs."""
