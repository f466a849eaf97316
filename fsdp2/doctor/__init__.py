"""``fsdp2 doctor``: what is wrong with the machines of a job, found before the job runs."""
