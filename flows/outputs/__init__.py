"""What a job writes: one writer for each format, beside it the failed rows and a manifest."""
